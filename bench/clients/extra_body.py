"""Fields that vLLM's users send through the ``extra_body`` of the ``openai`` client."""

from __future__ import annotations

from typing import Any

from checks import TIMEOUT_S, Table, Target, equal, raises

PACKAGES = ("openai",)
USER: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]


def run(target: Target, table: Table) -> None:
    import openai

    with openai.OpenAI(
        base_url=target.v1, api_key=target.key, max_retries=0, timeout=TIMEOUT_S
    ) as client:
        asked = Asked(client, target.model)
        sampling(asked, table)
        if target.samples:
            chosen(asked, table)
        else:
            table.leave_out("what the sampler leaves out", "nothing is sampled here")
        endings(asked, table)
        shown(asked, table)
        prompts(asked, table)
        scheduling(asked, table, target)


class Asked:
    """The two older routes, with what does not matter already filled in."""

    def __init__(self, client: Any, model: str) -> None:
        self.client = client
        self.model = model

    def chat(
        self, *, messages: Any = USER, max_tokens: int = 12, seed: int = 1, **extra: Any
    ) -> Any:
        known = {k: extra.pop(k) for k in ("logprobs", "top_logprobs", "stop") if k in extra}
        return self.client.chat.completions.create(
            model=self.model,
            messages=messages,
            max_tokens=max_tokens,
            seed=seed,
            **known,
            extra_body=extra,
        )

    def completion(self, *, prompt: Any = "Once upon", max_tokens: int = 12, **extra: Any) -> Any:
        known = {k: extra.pop(k) for k in ("echo", "logprobs", "stop") if k in extra}
        return self.client.completions.create(
            model=self.model,
            prompt=prompt,
            max_tokens=max_tokens,
            seed=1,
            **known,
            extra_body=extra,
        )


def ids(answer: Any) -> list[int]:
    return list(answer.choices[0].token_ids)


def tokens(answer: Any) -> list[str]:
    """Texts of a chat's tokens, without spaces around them."""
    return [token.token.strip() for token in answer.choices[0].logprobs.content]


def sampling(asked: Asked, table: Table) -> None:
    with table.check("top_k, min_p, repetition_penalty"):
        asked.chat(top_k=5, min_p=0.05, repetition_penalty=1.1, temperature=0.8)
        asked.completion(top_k=-1, min_p=0, repetition_penalty=1)
    with table.check("values out of range are a 400 that names the field"):
        import openai

        for field, value in {"top_k": -5, "min_p": 2, "repetition_penalty": 0}.items():
            with raises(openai.BadRequestError, param=field):
                asked.chat(**{field: value})


def chosen(asked: Asked, table: Table) -> None:
    with table.check("top_k 1 is greedy"):
        greedy = {"return_token_ids": True, "ignore_eos": True}
        equal(
            ids(asked.completion(top_k=1, **greedy)),
            ids(asked.completion(temperature=0, **greedy)),
        )
    with table.check("allowed_token_ids"):
        allowed = [40, 41, 42]
        answer = asked.chat(allowed_token_ids=allowed, return_token_ids=True, ignore_eos=True)
        assert set(ids(answer)) <= set(allowed), ids(answer)
    with table.check("bad_words"):
        plain = tokens(asked.chat(temperature=0, logprobs=True, ignore_eos=True))
        word = next(token for token in plain if token.isascii() and token.isalnum())
        held = tokens(asked.chat(temperature=0, logprobs=True, ignore_eos=True, bad_words=[word]))
        assert word not in held, (word, held)
    with table.check("repetition_penalty changes what follows"):
        far = {"temperature": 0, "max_tokens": 60, "ignore_eos": True}
        plain, held = asked.completion(**far), asked.completion(repetition_penalty=1.5, **far)
        assert plain.choices[0].text != held.choices[0].text


def endings(asked: Asked, table: Table) -> None:
    endless: dict[str, Any] = {"ignore_eos": True, "return_token_ids": True}
    with table.check("ignore_eos: as many tokens as max_tokens"):
        answer = asked.chat(max_tokens=60, **endless)
        equal(answer.choices[0].finish_reason, "length")
        equal(answer.usage.completion_tokens, 60)
    with table.check("stop_token_ids: stop_reason is the token"):
        first = ids(asked.completion(**endless))
        stopped = asked.completion(stop_token_ids=[first[5]], **endless).choices[0]
        equal(stopped.finish_reason, "stop")
        equal(stopped.stop_reason, first[5])
        equal(stopped.token_ids, first[: first.index(first[5]) + 1])
    with table.check("min_tokens: stop tokens do not end it earlier"):
        early = first[1]
        answer = asked.completion(stop_token_ids=[early], min_tokens=8, **endless)
        assert answer.usage.completion_tokens >= 8
    with table.check("include_stop_str_in_output, stop_reason is the text"):
        text = asked.completion(**endless).choices[0].text
        stop = next(c for c in text[2:] if c.isalnum())
        choice = asked.completion(stop=[stop], include_stop_str_in_output=True).choices[0]
        assert choice.text.endswith(stop)
        equal(choice.stop_reason, stop)


def shown(asked: Asked, table: Table) -> None:
    with table.check("prompt_logprobs, both routes"):
        prompt = asked.chat(prompt_logprobs=1).prompt_logprobs
        equal(prompt[0], None)
        entry = next(iter(prompt[1].values()))
        assert entry.keys() == {"logprob", "rank", "decoded_token"}
        assert asked.completion(prompt_logprobs=0).choices[0].prompt_logprobs[1]
    with table.check("echo with logprobs: prompt and answer together"):
        answer = asked.completion(
            prompt=[5, 6, 7], echo=True, logprobs=2, max_tokens=4, ignore_eos=True
        ).choices[0]
        equal(len(answer.logprobs.tokens), 7)
        equal(answer.logprobs.token_logprobs[0], None)
        equal(answer.logprobs.text_offset[0], 0)
    with table.check("return_token_ids: of the prompt and of the answer"):
        answer = asked.chat(return_token_ids=True)
        equal(len(answer.prompt_token_ids), answer.usage.prompt_tokens)
        equal(len(answer.choices[0].token_ids), answer.usage.completion_tokens)
    with table.check("return_token_ids, streamed"):
        whole = asked.completion(prompt=[5, 6, 7], return_token_ids=True)
        chunks = list(
            asked.client.completions.create(
                model=asked.model,
                prompt=[5, 6, 7],
                max_tokens=12,
                seed=1,
                stream=True,
                extra_body={"return_token_ids": True},
            )
        )
        got = [i for chunk in chunks for i in getattr(chunk.choices[0], "token_ids", None) or []]
        equal(got, ids(whole))
        equal(chunks[0].choices[0].prompt_token_ids, [5, 6, 7])
    with table.check("return_tokens_as_token_ids"):
        answer = asked.chat(return_tokens_as_token_ids=True, logprobs=True)
        assert answer.choices[0].logprobs.content[0].token.startswith("token_id:")
    with table.check("skip_special_tokens, spaces_between_special_tokens"):
        asked.chat(skip_special_tokens=False, spaces_between_special_tokens=True)


def prompts(asked: Asked, table: Table) -> None:
    begun = [*USER, {"role": "assistant", "content": "The capital is"}]
    with table.check("add_generation_prompt, continue_final_message"):
        continued = asked.chat(
            messages=begun,
            add_generation_prompt=False,
            continue_final_message=True,
            return_prompt_text=True,
        )
        assert continued.prompt_text.endswith("The capital is"), continued.prompt_text
        plain = asked.chat(add_generation_prompt=False)
        assert plain.usage.prompt_tokens < asked.chat().usage.prompt_tokens
    with table.check("both at once are a 400"):
        import openai

        with raises(openai.BadRequestError):
            asked.chat(messages=begun, add_generation_prompt=True, continue_final_message=True)
    with table.check("chat_template_kwargs, documents, reasoning_effort"):
        asked.chat(
            chat_template_kwargs={"enable_thinking": False},
            documents=[{"title": "a", "text": "b"}],
            reasoning_effort="low",
        )
    with table.check("truncate_prompt_tokens: the last ones are kept"):
        answer = asked.completion(
            prompt=list(range(5, 25)), truncate_prompt_tokens=4, return_token_ids=True
        )
        equal(answer.choices[0].prompt_token_ids, [21, 22, 23, 24])
        equal(answer.usage.prompt_tokens, 4)
    with table.check("add_special_tokens"):
        asked.completion(add_special_tokens=False)


def scheduling(asked: Asked, table: Table, target: Target) -> None:
    if target.room is None:
        table.leave_out("priority", "the server's policy is not known")
    else:
        with table.check("priority: refused unless the server's policy heeds it"):
            import openai

            asked.chat(priority=0)
            with raises(openai.BadRequestError, param="priority"):
                asked.chat(priority=1)
    with table.check("cache_salt: equal salts share a prefix, others do not"):
        prompt = [5 + i % 30 for i in range(100)]

        def cached(salt: str) -> int:
            usage = asked.completion(prompt=prompt, cache_salt=salt).usage
            return int(usage.prompt_tokens_details.cached_tokens)

        cached("a")
        assert cached("a") > 0
        equal(cached("b"), 0)
    with table.check("request_id, include_timings"):
        answer = asked.chat(request_id="mine", include_timings=True)
        equal(answer.id, "chatcmpl-mine")
        assert answer.metrics["time_to_first_token_ms"] >= 0
    with table.check("structured output is refused by name"):
        import openai

        for field, value in {
            "guided_json": {"type": "object"},
            "structured_outputs": {"regex": "a+"},
            "use_beam_search": True,
        }.items():
            with raises(openai.BadRequestError, param=field):
                asked.chat(**{field: value})
