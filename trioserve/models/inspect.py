"""The stage ``inspect``: from files to a ``ResolvedModel``, before any memory is taken.

Reads headers and small files only: what is missing, truncated, misshapen or unsupported is known
here, in the parent, in well under a second.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

import attrs

from trioserve.config.schema import ModelConfig
from trioserve.errors import ModelError
from trioserve.models.files import pickle_refused, read_error, read_object, read_object_if_there
from trioserve.models.generation import (
    CONFIG_NAMES,
    GGUF_NAMES,
    GenerationDefaults,
    read_defaults,
)
from trioserve.models.gguf_header import GGUFHeader, read_header
from trioserve.models.gguf_names import gguf_name, hf_name
from trioserve.models.llama_tensors import expected_tensors
from trioserve.models.random_model import BOS_TOKEN, CHAT_TEMPLATE, EOS_TOKEN, RandomModel
from trioserve.models.safetensors_header import (
    INDEX_NAME,
    PICKLE_PATTERNS,
    read_checkpoint,
    read_file,
    some,
)
from trioserve.models.source import parse_source
from trioserve.models.spec import ModelSpec, ResolvedModel, TensorInfo
from trioserve.models.spec_from_config import spec_from_config
from trioserve.models.spec_from_gguf import spec_from_gguf, text_at, vocabulary
from trioserve.models.tokenizer_files import (
    TokenizerFiles,
    find_tokenizer,
    read_override,
    read_token_ids,
    tokenizer_path,
)

log = logging.getLogger(__name__)
SETTING = 'model.generation_config = "none"'
FLOAT_DTYPES = ("F32", "F16", "BF16")


def inspect(found: Path | RandomModel, config: ModelConfig) -> ResolvedModel:
    """All that can be known of a model without reading its weights. Blocking; pure reads.

    ``tokenizer_path`` of the result may name a GGUF file or a sentencepiece ``tokenizer.model``:
    ``resolve_model`` has a tokenizer.json made from it.

    Raises:
        ModelError: the model cannot be served; one line with the file, the fault and the remedy.
    """
    name = parse_source(config.source).name
    if isinstance(found, RandomModel):
        model = _inspect_random(found, config, name)
    else:
        try:
            model = _inspect_path(found, config, name)
        except OSError as error:
            raise read_error(found, error) from error
    if config.chat_template is not None:
        model = attrs.evolve(model, chat_template=read_override(config.chat_template))
    for warning in model.warnings:
        log.warning("%s", warning)
    return _with_defaults(model, config)


def _with_defaults(model: ResolvedModel, config: ModelConfig) -> ResolvedModel:
    if not model.generation.given():
        return model
    if config.generation_config == "none":
        log.info("the model's defaults are off (%s): %s", SETTING, model.generation)
        return attrs.evolve(model, generation=GenerationDefaults())
    log.info("where a request says nothing, the model's defaults apply: %s", model.generation)
    return model


def _inspect_path(found: Path, config: ModelConfig, name: str) -> ResolvedModel:
    if found.is_dir():
        ggufs = sorted(found.glob("*.gguf"))
        if (found / "config.json").exists() or not ggufs:
            return _inspect_directory(found, None, config, name)
        if len(ggufs) > 1:
            names = some([path.name for path in ggufs])
            raise ModelError(f"{found} holds {len(ggufs)} GGUF files ({names}); name one of them")
        return _inspect_gguf(ggufs[0], config, name)
    with found.open("rb") as file:
        if file.read(4) == b"GGUF":
            return _inspect_gguf(found, config, name)
    return _inspect_directory(found.parent, found, config, name)


def _inspect_directory(
    directory: Path, weights: Path | None, config: ModelConfig, name: str
) -> ResolvedModel:
    """A checkpoint as transformers writes it; ``weights`` is the one file to take, if given."""
    path = directory / "config.json"
    if not path.exists():
        _refuse_bare_pickles(directory)
        raise ModelError(
            f"no config.json in {directory}: expected a model as transformers saves it"
        )
    values = read_object(path)
    generation = read_object_if_there(directory / "generation_config.json")
    spec = spec_from_config(values, generation, path)
    tensors = read_checkpoint(directory) if weights is None else read_file(weights)
    needed, warnings = match_tensors(spec, {tensor.name: tensor for tensor in tensors}, directory)
    where = str(directory / "generation_config.json")
    defaults, unusable = read_defaults(generation, CONFIG_NAMES, where, spec.vocab_size)
    _check_dtypes(needed)
    if "auto_map" in values:
        log.info("%s asks for remote code (auto_map): not needed, not run", path)
    text = find_tokenizer(directory, config.tokenizer)
    _check_vocabulary(text.path, text.num_ids, spec)
    return ResolvedModel(
        name=name,
        source=config.source,
        format="safetensors",
        spec=_with_text_eos(spec, text),
        tensors=needed,
        tokenizer_path=str(text.path.absolute()),
        chat_template=text.chat_template,
        bos_token=text.bos_token or _text_of(text, spec.bos_token_id),
        eos_token=text.eos_token or _text_of(text, next(iter(spec.eos_token_ids), None)),
        generation=defaults,
        warnings=(*warnings, *unusable),
    )


def _refuse_bare_pickles(directory: Path) -> None:
    pickles = sorted(path for glob in PICKLE_PATTERNS for path in directory.glob(glob))
    if (
        pickles
        and not any(directory.glob("*.safetensors"))
        and not (directory / INDEX_NAME).exists()
    ):
        raise pickle_refused(pickles[0])


def _with_text_eos(spec: ModelSpec, text: TokenizerFiles) -> ModelSpec:
    """The spec with the tokenizer's end token among its stop tokens.

    Chat models are tuned to end with it, and some of their config.json name the base model's.
    """
    token_id = text.token_ids.get(text.eos_token)
    if token_id is None or token_id in spec.eos_token_ids:
        return spec
    return attrs.evolve(spec, eos_token_ids=(*spec.eos_token_ids, token_id))


def _text_of(text: TokenizerFiles, token_id: int | None) -> str:
    return next((token for token, known in text.token_ids.items() if known == token_id), "")


def _inspect_gguf(path: Path, config: ModelConfig, name: str) -> ResolvedModel:
    header = read_header(path)
    spec = spec_from_gguf(header)
    needed, warnings = match_tensors(
        spec, _by_hf_name(header), path, lambda name: gguf_name(name) or name
    )
    tokens = vocabulary(header)
    defaults, unusable = read_defaults(header.metadata, GGUF_NAMES, str(path), spec.vocab_size)
    tokenizer = path
    if config.tokenizer is not None:
        tokenizer = tokenizer_path(path.parent, config.tokenizer)
        _check_vocabulary(tokenizer, read_token_ids(tokenizer)[0], spec)
    template = header.metadata.get("tokenizer.chat_template")
    return ResolvedModel(
        name=name,
        source=config.source,
        format="gguf",
        spec=spec,
        tensors=needed,
        tokenizer_path=str(tokenizer.absolute()),
        chat_template=template if isinstance(template, str) else None,
        bos_token=text_at(tokens, spec.bos_token_id),
        eos_token=text_at(tokens, next(iter(spec.eos_token_ids), None)),
        generation=defaults,
        warnings=(*warnings, *unusable),
    )


def _by_hf_name(header: GGUFHeader) -> dict[str, TensorInfo]:
    """The tensors under transformers' names; those without one keep GGUF's."""
    return {hf_name(tensor.name) or tensor.name: tensor for tensor in header.tensors}


def _inspect_random(found: RandomModel, config: ModelConfig, name: str) -> ResolvedModel:
    tokenizer = found.tokenizer_path
    if config.tokenizer is not None:
        tokenizer = tokenizer_path(tokenizer.parent, config.tokenizer)
        _check_vocabulary(tokenizer, read_token_ids(tokenizer)[0], found.spec)
    return ResolvedModel(
        name=name,
        source=config.source,
        format="random",
        spec=found.spec,
        tokenizer_path=str(tokenizer),
        chat_template=CHAT_TEMPLATE,
        bos_token=BOS_TOKEN,
        eos_token=EOS_TOKEN,
        seed=found.seed,
    )


def with_tokenizer(model: ResolvedModel, path: Path) -> ResolvedModel:
    """``model`` with the tokenizer.json that was made for it, checked against its embedding.

    Raises:
        ModelError: it has more ids than the model has embeddings.
    """
    num_ids, token_ids = read_token_ids(path)
    _check_vocabulary(path, num_ids, model.spec)
    text = TokenizerFiles(path, num_ids, token_ids, model.bos_token, model.eos_token, None)
    spec = _with_text_eos(model.spec, text)
    return attrs.evolve(
        model,
        spec=spec,
        tokenizer_path=str(path),
        bos_token=text.bos_token or _text_of(text, spec.bos_token_id),
        eos_token=text.eos_token or _text_of(text, next(iter(spec.eos_token_ids), None)),
    )


def match_tensors(
    spec: ModelSpec,
    found: Mapping[str, TensorInfo],
    where: Path,
    called: Callable[[str], str] = str,
) -> tuple[tuple[TensorInfo, ...], tuple[str, ...]]:
    """The tensors that the architecture needs, in its order, and warnings about others.

    ``found`` is keyed by transformers' names; ``called`` turns one into the file's own. Rotary
    tables and a tied output embedding that is stored all the same are passed over in silence.

    Raises:
        ModelError: some are missing (the first few and a count), or of another shape.
    """
    expected = expected_tensors(spec)
    missing = [called(name) for name in expected if name not in found]
    if missing:
        raise ModelError(
            f"{where}: {len(missing)} of {len(expected)} tensors missing: {some(missing)}"
        )
    wrong = [
        f"{called(name)} is {list(found[name].shape)}, expected {list(shape)}"
        for name, shape in expected.items()
        if found[name].shape != shape
    ]
    if wrong:
        raise ModelError(
            f"{where}: {len(wrong)} of {len(expected)} tensors of wrong shape: {some(wrong)}"
        )
    extra = [name for name in found if name not in expected and not _passed_over(name, spec)]
    warnings = (f"{where}: {len(extra)} tensors unknown, ignored: {some(extra)}",) if extra else ()
    return tuple(found[name] for name in expected), warnings


def _passed_over(name: str, spec: ModelSpec) -> bool:
    tied_copy = name == "lm_head.weight" and spec.tie_embeddings
    rotary = name.endswith(("rotary_emb.inv_freq", ".attn_rot_embd")) or name == "rope_freqs.weight"
    return tied_copy or rotary


def _check_dtypes(tensors: tuple[TensorInfo, ...]) -> None:
    for tensor in tensors:
        if tensor.dtype not in FLOAT_DTYPES:
            supported = ", ".join(FLOAT_DTYPES)
            raise ModelError(
                f"{tensor.path}: tensor {tensor.name} has dtype {tensor.dtype}, unsupported; "
                f"supported: {supported}"
            )


def _check_vocabulary(path: Path, num_ids: int, spec: ModelSpec) -> None:
    """An id beyond the embedding would be read from other memory, or end the worker."""
    if num_ids > spec.vocab_size:
        raise ModelError(
            f"{path} has token ids up to {num_ids - 1}, the model has {spec.vocab_size} embeddings"
        )
