# ruff: noqa: RUF001 (letters of many scripts are what the prompts are for)
"""Makes tests/models/goldens/: what transformers answers, for the tests to compare with.

    OMP_NUM_THREADS=2 python tests/models/make_goldens.py path/to/SmolLM2-135M-Instruct.Q4_1.gguf

transformers reads the GGUF file itself, dequantizes it to float32 and decodes greedily, each prompt
alone and past any end token. Kept for each of 64 steps: the token chosen and the eight best logits.
Takes some minutes. ``prompts.json`` holds texts and token ids, ``smollm2.npz`` the rest:

    tokens  int32   [prompts, steps]       the greedy choice
    top_ids int32   [prompts, steps, 8]    best first
    top     float32 [prompts, steps, 8]    their logits
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoTokenizer, DynamicCache, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

NUM_STEPS = 64
NUM_TOP = 8
GOLDENS = Path(__file__).parent / "goldens"

PANGRAM = "The quick brown fox jumps over the lazy dog. "
TALE = (
    "A lighthouse stood at the end of a long pier. Every evening its keeper climbed the stairs, "
    "trimmed the wick and looked out over the water. One night no ship came, and the sea was as "
    "flat as a plate. "
)
SYSTEM = (
    "You are a careful assistant in a hardware shop. You answer in one or two sentences, name the "
    "tool that is needed, and say so plainly when you do not know something. "
)
PYTHON = '''def fibonacci(n: int) -> list[int]:
    """The first n Fibonacci numbers."""
    numbers = [0, 1]
    while len(numbers) < n:
'''
RUST = 'fn main() {\n    let words = vec!["one", "two", "three"];\n    for word in words.iter() {\n'
SQL = "SELECT customer_id, SUM(amount) AS total\nFROM orders\nWHERE created_at >= '2024-01-01'\n"
HTML = "<!DOCTYPE html>\n<html>\n<head><title>Menu</title></head>\n<body>\n<ul>\n<li>Soup</li>\n"
JSON = '{"name": "apple", "price": 1.25}\n{"name": "pear", "price": 0.99}\n{"name": '

# Raw text, continued as it is.
RAW = {
    "one-token": "The",
    "one-word": "Once",
    "space": " ",
    "newline": "\n",
    "one-digit": "7",
    "short": "The capital of France is",
    "sentence": "Water boils at a temperature of",
    "half-word": "The photosyn",
    "counting": "1, 2, 3, 4, 5, 6,",
    "digits": "3.14159265358979323846264338327950288419716939937510",
    "dates": "2021-01-05, 2021-01-12, 2021-01-19,",
    "sum": "12 + 30 = 42\n17 + 25 = 42\n8 + 9 =",
    "python": PYTHON,
    "rust": RUST,
    "sql": SQL,
    "html": HTML,
    "json-lines": JSON,
    "shell": "$ ls -la\ntotal 24\ndrwxr-xr-x  2 root root 4096 Jan  1 00:00 .\n",
    "chinese": "今天天气很好,我们去公园",
    "japanese": "むかしむかし、あるところに",
    "korean": "안녕하세요, 오늘은",
    "russian": "Жили-были старик со старухой у самого",
    "arabic": "كان يا ما كان في قديم",
    "german": "Es war einmal ein kleines Mädchen, das wohnte",
    "french": "Il était une fois, dans un pays lointain,",
    "emoji": "🙂🙃 🎉🎉🎉 👩‍🚀 🚀",
    "combining": "e\u0301 a\u0300 n\u0303 — ‘quoted’ “text” …",
    "upper": "THIS IS A SIGN. DO NOT",
    "repeated-word": "again and again and again and again and again and",
    "repeated-letter": "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "repeated-sentence": PANGRAM * 12,
    "long-tale": TALE * 4,
    "tale-a": TALE + "In the morning",
    "tale-b": TALE + "In the evening",
    "tale-c": TALE + TALE + "But then",
    "list": "Shopping list:\n- milk\n- bread\n- eggs\n-",
    "poem": "Roses are red,\nviolets are blue,\n",
    "long-list": "".join(f"{n}. item number {n}\n" for n in range(1, 41)),
}
# Questions in the chat template: (system text or none, question).
CHAT = {
    "hello": ("", "Hello!"),
    "capital": ("", "What is the capital of Italy?"),
    "explain": ("", "Explain in two sentences why the sky is blue."),
    "code": ("", "Write a Python function that reverses a string."),
    "translate": ("", "Translate to German: Good morning, how are you?"),
    "emoji": ("", "What does 🦊 mean?"),
    "cjk": ("", "请用一句话介绍北京。"),
    "long": ("", "Summarise this text in one sentence: " + TALE * 3),
    "shop-nail": (SYSTEM, "How do I pull a nail out of a board?"),
    "shop-tile": (SYSTEM, "How do I cut a tile?"),
    "shop-unknown": (SYSTEM, "What will the weather be tomorrow?"),
    "shop-long": (SYSTEM * 4, "Which drill bit do I need for a concrete wall?"),
}


def main(path: Path) -> None:
    """Write the goldens of the model in ``path``."""
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = load(path)
    prompts = encode(tokenizer)
    tokens, top_ids, top = [], [], []
    for prompt in prompts:
        step_tokens, step_ids, step_top = decode(model, prompt["token_ids"])
        tokens.append(step_tokens)
        top_ids.append(step_ids)
        top.append(step_top)
        text = tokenizer.decode(step_tokens)[:50]
        print(f"{len(tokens)}/{len(prompts)} {prompt['name']}: {text!r}", flush=True)
    GOLDENS.mkdir(exist_ok=True)
    np.savez_compressed(
        GOLDENS / "smollm2.npz",
        tokens=np.array(tokens, dtype=np.int32),
        top_ids=np.array(top_ids, dtype=np.int32),
        top=np.array(top, dtype=np.float32),
    )
    lines = ",\n".join(json.dumps(prompt, ensure_ascii=False) for prompt in prompts)
    (GOLDENS / "prompts.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def load(path: Path) -> LlamaForCausalLM:
    """The model in float32; transformers dequantizes and renames the tensors."""
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    config.dtype = torch.float32
    model = LlamaForCausalLM._from_config(config, attn_implementation="eager").eval()
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    result = model.load_state_dict(tensors, strict=False)
    assert result.missing_keys == ["lm_head.weight"], result
    assert not result.unexpected_keys, result
    assert config.tie_word_embeddings
    model.tie_weights()
    return model


def encode(tokenizer) -> list[dict]:
    """All prompts: name, text, whether it is a chat prompt, token ids."""
    prompts = [
        {
            "name": f"raw-{name}",
            "text": text,
            "messages": None,
            "token_ids": tokenizer.encode(text, add_special_tokens=False),
        }
        for name, text in RAW.items()
    ]
    for name, (system, question) in CHAT.items():
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": question})
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        prompts.append(
            {"name": f"chat-{name}", "text": text, "messages": messages, "token_ids": token_ids}
        )
    return prompts


@torch.inference_mode()
def decode(model, token_ids: list[int]) -> tuple[list[int], list, list]:
    """Greedy tokens of one prompt, and ids and logits of the best eight at every step."""
    cache = DynamicCache(config=model.config)
    feed = torch.tensor([token_ids])
    tokens, ids, values = [], [], []
    for _ in range(NUM_STEPS):
        logits = model(feed, past_key_values=cache, logits_to_keep=1).logits[0, -1]
        best = logits.topk(NUM_TOP)
        tokens.append(int(best.indices[0]))
        ids.append(best.indices.tolist())
        values.append(best.values.tolist())
        feed = torch.tensor([[tokens[-1]]])
    return tokens, ids, values


if __name__ == "__main__":
    main(Path(sys.argv[1]))
