"""What the generator promises, on real tiny models."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.models import Architecture, model_tokenizer, tiny_model
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    PreTrainedModel,
    RobertaConfig,
    RobertaForCausalLM,
)

from agentlightning.engine.base import SamplingParams
from agentlightning.engine.local import cascade_attention, kv_cache, scheduler
from agentlightning.engine.local.kv_cache import probe_layout, vocab_size
from agentlightning.engine.local.scheduler import ContinuousBatcher, Request, StepThreads
from agentlightning.errors import ConfigError, ContextLengthError, PolicyError

pytestmark = pytest.mark.integration

ARCHITECTURES: tuple[Architecture, ...] = ("llama", "qwen3", "gpt2", "mistral")
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


def decode(tokens: Sequence[int]) -> str:
    return model_tokenizer().decode(list(tokens), skip_special_tokens=False)


def generator(model: PreTrainedModel, eos: frozenset[int] = frozenset(), **options: int) -> ContinuousBatcher:
    length = model.config.max_position_embeddings
    return ContinuousBatcher(model, eos_token_ids=eos, decode=decode, context_length=length, **options)


def drain(engine: ContinuousBatcher) -> None:
    for _ in range(5000):
        if engine.idle:
            return
        engine.step()
    raise AssertionError("the generator does not come to an end")


def answers(engine: ContinuousBatcher, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[Request]:
    requests = [engine.submit(prompt, params) for prompt in prompts]
    drain(engine)
    return requests


def prompts_of(count: int, *, seed: int = 0, shortest: int = 1, longest: int = 60) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 300) for _ in range(rng.randint(shortest, longest))] for _ in range(count)]


def by_transformers(model: PreTrainedModel, prompt: Sequence[int], new: int) -> list[int]:
    ids = torch.tensor([list(prompt)])
    model.generation_config.eos_token_id = None
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)
    return out[0, len(prompt) :].tolist()


def scored(model: PreTrainedModel, request: Request, temperature: float = 1.0) -> torch.Tensor:
    """Log-probabilities of what was drawn, by one plain forward over the whole sequence."""
    ids = torch.tensor([request.tokens])
    with torch.inference_mode():
        logprobs = (model(ids).logits.float() / temperature).log_softmax(-1)[0, request.prompt_length - 1 : -1]
    return logprobs.gather(1, ids[0, request.prompt_length :, None])[:, 0]


def assert_faithful(model: PreTrainedModel, requests: Sequence[Request], temperature: float = 1.0) -> None:
    for request in requests:
        torch.testing.assert_close(
            torch.tensor(request.logprobs), scored(model, request, temperature), atol=1e-4, rtol=0
        )


class Counter:
    """Tokens that the model computed since the last `pop`."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.tokens = 0
        model.get_input_embeddings().register_forward_pre_hook(self._hook)

    def _hook(self, module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        self.tokens += args[0].numel()

    def pop(self) -> int:
        tokens, self.tokens = self.tokens, 0
        return tokens


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_answers_are_those_of_transformers_whenever_requests_join_and_leave(architecture: Architecture) -> None:
    model = tiny_model(architecture)
    engine = generator(model, max_batch_size=5, prefill_tokens=48)
    rng, prompts = random.Random(1), prompts_of(12, seed=2)
    wanted = [rng.randint(1, 14) for _ in prompts]
    requests: list[Request] = []
    for prompt, new in zip(prompts, wanted, strict=True):
        requests.append(engine.submit(prompt, SamplingParams(temperature=0.0, max_tokens=new)))
        for _ in range(rng.randint(0, 4)):
            engine.step()
    drain(engine)
    for request, prompt, new in zip(requests, prompts, wanted, strict=True):
        assert request.sampled == by_transformers(model, prompt, new)
    assert_faithful(model, requests)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_recorded_logprobs_are_those_of_a_scoring_forward(architecture: Architecture) -> None:
    model = tiny_model(architecture)
    engine = generator(model, prefill_tokens=16)
    requests = answers(engine, prompts_of(6, shortest=20), SamplingParams(temperature=0.7, max_tokens=30))
    assert_faithful(model, requests, temperature=0.7)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_shared_prefixes_are_computed_once_without_changing_answers(
    architecture: Architecture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cascade_attention, "MIN_SAVED_BYTES", 0)
    model = tiny_model(architecture)
    base = prompts_of(3, seed=5, shortest=50, longest=70)
    prompts = [[*base[i % 3], *([7, i + 10] if i % 2 else [])] for i in range(12)]
    plain = generator(model, prefix_cache_bytes=0)
    plain._use_cascade = False
    sharing = generator(model)
    computed = Counter(model)
    alone, apart = answers(plain, prompts, GREEDY), computed.pop()
    together, once = answers(sharing, prompts, GREEDY), computed.pop()
    assert [request.tokens for request in together] == [request.tokens for request in alone]
    assert_faithful(model, together)
    assert once < apart / 2


def test_the_next_turn_of_a_conversation_computes_only_its_new_tokens() -> None:
    model = tiny_model()
    engine = generator(model)
    (first,) = answers(engine, prompts_of(1, shortest=60), GREEDY)
    computed = Counter(model)
    (second,) = answers(engine, [[*first.tokens, 5, 6, 7]], GREEDY)
    assert computed.pop() == 1 + 3 + len(second.sampled) - 1
    assert_faithful(model, [second])


def test_a_shared_prefix_is_read_once_per_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cascade_attention, "MIN_SAVED_BYTES", 0)
    model = tiny_model("qwen3")
    engine = generator(model)
    base = prompts_of(2, seed=8, shortest=50, longest=70)
    requests = [
        engine.submit(prompt, SamplingParams(max_tokens=3 + 5 * i)) for i, prompt in enumerate([*base, *base, base[0]])
    ]
    engine.step()
    assert engine._shared_prefix is not None
    assert sorted(map(len, engine._shared_prefix.groups.rows)) == [2, 3]
    drain(engine)
    assert_faithful(model, requests)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_another_attention_implementation_samples_the_same(architecture: Architecture) -> None:
    model = tiny_model(architecture)
    prompts = prompts_of(3, shortest=30) * 2
    expected = [request.tokens for request in answers(generator(model), prompts, GREEDY)]
    model.set_attn_implementation("eager")
    requests = answers(generator(model), prompts, GREEDY)
    assert [request.tokens for request in requests] == expected
    assert_faithful(model, requests)


def test_nothing_cached_survives_a_weight_update() -> None:
    model = tiny_model()
    engine = generator(model)
    prompts = prompts_of(2, shortest=40) * 4
    before = answers(engine, prompts, SamplingParams(max_tokens=8))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    engine.invalidate_cache()
    after = answers(engine, prompts, SamplingParams(max_tokens=8))
    assert_faithful(model, after)
    assert not torch.allclose(torch.tensor(before[0].logprobs), scored(model, before[0]), atol=1e-2)


def test_the_weights_may_not_change_with_answers_in_flight() -> None:
    engine = generator(tiny_model())
    engine.submit([5, 6], GREEDY)
    with pytest.raises(PolicyError, match="in flight"):
        engine.invalidate_cache()


def test_a_seed_is_reproducible_in_any_batch() -> None:
    model = tiny_model()
    params = SamplingParams(max_tokens=20, seed=11)
    prompt = prompts_of(1, shortest=30)[0]
    (alone,) = answers(generator(model), [prompt], params)
    engine = generator(model, seed=99)
    for other in prompts_of(6, seed=3):
        engine.submit(other, SamplingParams(max_tokens=15))
    engine.step()
    (together,) = answers(engine, [prompt], params)
    assert together.tokens == alone.tokens


def test_the_random_state_can_be_saved_and_restored() -> None:
    model = tiny_model()
    engine, other = generator(model, seed=1), generator(model, seed=2)
    prompts = prompts_of(3)
    answers(engine, prompts, SamplingParams(max_tokens=4))
    other.load_state_dict(engine.state_dict())
    one, two = (answers(each, prompts, SamplingParams(max_tokens=8)) for each in (engine, other))
    assert [request.tokens for request in one] == [request.tokens for request in two]


def test_samples_follow_the_models_distribution() -> None:
    model = tiny_model()
    prompt = prompts_of(1, shortest=10)[0]
    with torch.inference_mode():
        probabilities = (model(torch.tensor([prompt])).logits[0, -1] / 2).softmax(-1)
    count = 4000
    requests = answers(generator(model), [prompt] * count, SamplingParams(temperature=2.0, max_tokens=1))
    seen = torch.bincount(torch.tensor([r.sampled[0] for r in requests]), minlength=len(probabilities))
    common = probabilities * count >= 5
    expected = probabilities[common] * count
    chi_square = ((seen[common] - expected) ** 2 / expected).sum().item()
    degrees = int(common.sum()) - 1
    assert degrees > 20
    assert chi_square < degrees + 5 * (2 * degrees) ** 0.5
    assert_faithful(model, requests[:5], temperature=2.0)


@pytest.mark.parametrize("odd", [{"temperature": 1e-39}, {"temperature": 1e-300}, {"top_p": 1e-50}, {"min_p": 1e-50}])
def test_tiny_temperatures_sample_the_most_likely_token(odd: dict[str, float]) -> None:
    model, prompt = tiny_model(), prompts_of(1, shortest=10)[0]
    alone = answers(generator(model), [prompt], SamplingParams(seed=7, max_tokens=6))[0]
    engine = generator(model)
    beside = engine.submit(prompt, SamplingParams(seed=7, max_tokens=6))
    cold = engine.submit(prompt, SamplingParams(max_tokens=6, **odd))
    drain(engine)
    assert beside.sampled == alone.sampled
    if "min_p" not in odd:
        assert cold.sampled == answers(generator(model), [prompt], replace(GREEDY, max_tokens=6))[0].sampled
        assert cold.logprobs == [0.0] * 6


def test_an_end_token_ends_the_answer_and_is_part_of_it() -> None:
    model = tiny_model()
    prompt = prompts_of(1, shortest=10)[0]
    expected = by_transformers(model, prompt, 12)
    (request,) = answers(generator(model, eos=frozenset({expected[4]})), [prompt], GREEDY)
    stop = expected.index(expected[4])
    assert request.sampled == expected[: stop + 1]
    assert request.finish_reason == "stop"


def test_a_stop_string_ends_the_answer_even_across_tokens() -> None:
    model = tiny_model()
    prompt = prompts_of(1, shortest=10)[0]
    (free,) = answers(generator(model), [prompt], SamplingParams(max_tokens=40, seed=3))
    text = decode(free.sampled)
    stop = text[20:23]
    (stopped,) = answers(generator(model), [prompt], SamplingParams(max_tokens=40, seed=3, stop=("never", stop)))
    assert stopped.finish_reason == "stop"
    assert stop in decode(stopped.sampled)
    assert stop not in decode(stopped.sampled[:-1])


def test_an_answer_ends_with_the_context() -> None:
    model = tiny_model("gpt2", context_length=32)
    engine = generator(model)
    prompts = [list(range(3, 33)), list(range(3, 34)), [5]]
    requests = answers(engine, prompts, SamplingParams(temperature=0.0))
    assert [len(request.tokens) for request in requests] == [32, 32, 32]
    assert {request.finish_reason for request in requests} == {"length"}
    assert_faithful(model, requests)


def test_a_cancelled_request_frees_its_row_without_affecting_others() -> None:
    model = tiny_model()
    engine = generator(model, max_batch_size=2)
    first, second, third = (engine.submit(prompt, GREEDY) for prompt in prompts_of(3, shortest=20))
    engine.step()
    assert third.cached == 0
    engine.cancel(first)
    assert not first.finish_reason
    engine.step()
    assert third.cached > 0
    drain(engine)
    for request in (second, third):
        assert request.sampled == by_transformers(model, request.tokens[: request.prompt_length], 12)


def test_cancelling_the_last_request_leaves_the_batcher_idle() -> None:
    engine = generator(tiny_model(), prefill_tokens=8)
    drawing, prefilling = engine.submit([5, 6], GREEDY), engine.submit(prompts_of(1, shortest=60)[0], GREEDY)
    engine.step()
    waiting = engine.submit([5], GREEDY)
    assert drawing.sampled
    assert prefilling.prefill_remaining
    for request in (prefilling, waiting, drawing):
        assert not engine.idle
        engine.cancel(request)
    assert engine.idle


def test_a_long_prompt_does_not_delay_other_requests() -> None:
    model = tiny_model()
    engine = generator(model, prefill_tokens=16)
    short = engine.submit([5, 6, 7], SamplingParams(temperature=0.0, max_tokens=40))
    engine.step()
    long = engine.submit(prompts_of(1, shortest=160, longest=160)[0], GREEDY)
    for drawn in range(2, 9):
        engine.step()
        assert len(short.sampled) == drawn
    assert not long.sampled
    drain(engine)
    assert_faithful(model, [short, long])


def test_requests_beyond_memory_wait() -> None:
    model = tiny_model()
    roomy = generator(model)
    tight = generator(model, kv_cache_bytes=3 * 64 * roomy._cache.layout.bytes_per_token, prefix_cache_bytes=0)
    prompts = prompts_of(6, shortest=40)
    params = SamplingParams(temperature=0.0, max_tokens=50)
    expected = [request.tokens for request in answers(roomy, prompts, params)]
    requests = answers(tight, prompts, params)
    assert [request.tokens for request in requests] == expected
    assert tight._cache.slots * tight._cache.capacity <= 3 * 64
    assert_faithful(model, requests)


def test_a_preempted_request_knows_its_versions() -> None:
    model = tiny_model()
    room = 2 * kv_cache.BLOCK * probe_layout(model).bytes_per_token
    engine = generator(model, kv_cache_bytes=room, prefix_cache_bytes=0)
    params = SamplingParams(max_tokens=kv_cache.BLOCK)
    first, second = (engine.submit(prompt, params) for prompt in prompts_of(2, shortest=40, longest=40))
    while not (engine._waiting and second.logprobs):
        engine.step()
    assert list(engine._waiting) == [second]  # There is memory for one of so many tokens.
    drawn = [len(request.logprobs) for request in (first, second)]
    engine.invalidate_cache(in_flight=True)
    engine.policy_version = 1
    drain(engine)
    for request, before in zip((first, second), drawn, strict=True):
        assert request.versions == ((0, before), (1, kv_cache.BLOCK - before))


def test_a_small_prefix_cache_stays_within_its_limit() -> None:
    model = tiny_model()
    limit = 100 * generator(model)._cache.layout.bytes_per_token
    engine = generator(model, prefix_cache_bytes=limit)
    requests = answers(engine, prompts_of(10, shortest=30) * 2, GREEDY)
    assert 0 < engine.prefix_cache.num_bytes <= limit
    assert_faithful(model, requests)


def test_weights_that_are_not_finite_are_reported_with_the_way_out() -> None:
    model = tiny_model()
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    engine = generator(model)
    engine.submit([5, 6], SamplingParams(max_tokens=3))
    with pytest.raises(PolicyError, match="earlier checkpoint"):
        engine.step()


def other_attention(kind: str) -> PreTrainedModel:
    """Models that do not take what `ContinuousBatcher` gives rows of different lengths that share a pass."""
    shape: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    eos: dict[str, Any] = {"eos_token_id": 2, "bos_token_id": None, "pad_token_id": None}
    if kind == "gpt-neo":
        config = GPTNeoConfig(
            vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]],
            window_size=16, max_position_embeddings=256, **eos,
        )  # fmt: skip
        return GPTNeoForCausalLM(config)
    if kind == "bloom":
        config = BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4, **eos)
        config.max_position_embeddings = 256
        return BloomForCausalLM(config)
    if kind == "falcon-alibi":
        return FalconForCausalLM(FalconConfig(**shape, alibi=True, max_position_embeddings=256, **eos))
    return RobertaForCausalLM(
        RobertaConfig(
            **shape, intermediate_size=48, max_position_embeddings=260, is_decoder=True, **eos | {"pad_token_id": 1}
        )
    )


@pytest.mark.parametrize("kind", ["gpt-neo", "bloom", "falcon-alibi", "roberta"])
def test_a_model_whose_rows_cannot_share_a_pass_samples_them_one_by_one(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = other_attention(kind).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    engine = ContinuousBatcher(model, eos_token_ids=frozenset(), decode=decode, context_length=250)
    assert "samples one row after the other" in caplog.text
    prompts = [[3 + (7 * n) % 60 for n in range(length)] for length in (3, 20, 70)]
    assert_faithful(model, answers(engine, prompts, SamplingParams(max_tokens=10, seed=1)))


def test_models_that_can_share_a_pass_do(caplog: pytest.LogCaptureFixture) -> None:
    for architecture in ARCHITECTURES:
        generator(tiny_model(architecture))
    assert "one row after the other" not in caplog.text


EVERY = tuple(range(vocab_size(tiny_model())))
GOOD = SamplingParams(max_tokens=6, seed=3, ignore_eos=True)


def finished(engine: ContinuousBatcher, *requests: Request) -> list[list[int]]:
    while not all(request.done for request in requests):
        engine.step()
    return [request.sampled for request in requests]


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (SamplingParams(max_tokens=3, min_tokens=1, stop_token_ids=EVERY), "min_tokens, stop_token_ids"),
        (SamplingParams(max_tokens=3, min_tokens=2, stop_token_ids=EVERY, top_p=0.5), "top_p, min_tokens"),
        (SamplingParams(max_tokens=3, min_tokens=1, stop_token_ids=EVERY, temperature=0), "temperature, min_tokens"),
    ],
)
def test_a_row_without_a_token_to_sample_fails_alone_and_names_its_parameters(
    params: SamplingParams, words: str
) -> None:
    (expected,) = finished(engine := generator(tiny_model()), engine.submit([5, 6, 7], GOOD))
    first, bad, last = (engine.submit([5, 6, 7], each) for each in (GOOD, params, GOOD))
    assert finished(engine, first, bad, last) == [expected, [], expected]
    assert isinstance(bad.error, ConfigError)
    assert words in str(bad.error)


def test_a_prompt_for_which_the_model_gives_no_number_fails_alone() -> None:
    model = tiny_model()
    (expected,) = finished(engine := generator(model), engine.submit([5, 6, 7], GOOD))
    with torch.no_grad():
        model.get_input_embeddings().weight[33] = float("nan")
    first, bad, last = (engine.submit(prompt, GOOD) for prompt in ([5, 6, 7], [33, 5], [5, 6, 7]))
    assert finished(engine, first, bad, last) == [expected, [], expected]
    assert isinstance(bad.error, PolicyError)
    assert finished(engine, engine.submit([5, 6, 7], GOOD)) == [expected], "its slot holds nothing of it"


@pytest.mark.parametrize(
    ("prompt", "params", "error", "words"),
    [
        ([], SamplingParams(), PolicyError, "no tokens"),
        ([1] * 256, SamplingParams(), ContextLengthError, "256 tokens"),
        ([1, 9999], SamplingParams(), ConfigError, "9999"),
        ([1, -1], SamplingParams(), ConfigError, "-1"),
        ([1, 2**70], SamplingParams(), ConfigError, "knows 0 to"),
        ([1], SamplingParams(temperature=-1.0), ConfigError, "temperature=-1"),
        ([1], SamplingParams(temperature=float("nan")), ConfigError, "temperature=nan"),
        ([1], SamplingParams(top_p=0.0), ConfigError, "top_p=0"),
        ([1], SamplingParams(top_k=-2), ConfigError, "top_k=-2"),
        ([1], SamplingParams(max_tokens=0), ConfigError, "max_tokens=0"),
        ([1], SamplingParams(top_k=2**63), ConfigError, "top_k=9223372036854775808"),
        ([1], SamplingParams(repetition_penalty=1e-300), ConfigError, "repetition_penalty=1e-300"),
        ([1], SamplingParams(presence_penalty=float("inf")), ConfigError, "presence_penalty=inf"),
        ([1], SamplingParams(frequency_penalty=1e38), ConfigError, "frequency_penalty=1e"),
        ([1], SamplingParams(logit_bias=((1, float("nan")),)), ConfigError, "logit_bias=nan"),
        ([1], SamplingParams(seed=2**64), ConfigError, "seed=18446744073709551616"),
        ([1], SamplingParams(stop=("",)), ConfigError, "empty string"),
        ([1], SamplingParams(json_schema="{}", grammar="start: "), ConfigError, "json_schema and grammar are both set"),
        ([1], SamplingParams(grammar="start: "), ConfigError, "this grammar cannot be enforced"),
    ],
)
def test_invalid_requests_are_rejected_with_the_field_name(
    prompt: list[int], params: SamplingParams, error: type[Exception], words: str
) -> None:
    engine = generator(tiny_model())
    with pytest.raises(error, match=words):
        engine.submit(prompt, params)
    assert engine.idle


MODEL = tiny_model("llama")
EXPECTED: dict[tuple[int, ...], list[int]] = {}


@settings(max_examples=25)
@given(
    arrivals=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6), st.integers(0, 3)), min_size=1, max_size=12),
    batch=st.integers(1, 6),
    prefill=st.sampled_from([4, 32, 512]),
    store=st.sampled_from([0, 20_000, 1 << 20]),
)
def test_no_order_of_arrival_changes_a_greedy_answer(
    arrivals: list[tuple[int, int, int]], batch: int, prefill: int, store: int
) -> None:
    prompts = prompts_of(2, seed=21, shortest=30, longest=40)
    choices = [prompts[0], prompts[1], prompts[0][:20], [*prompts[0], 9, 9], [*prompts[0][:20], 8], prompts[1][:1]]
    engine = generator(MODEL, max_batch_size=batch, prefill_tokens=prefill, prefix_cache_bytes=store)
    requests: list[Request] = []
    for which, new, steps in arrivals:
        requests.append(engine.submit(choices[which], SamplingParams(temperature=0.0, max_tokens=new)))
        for _ in range(steps):
            engine.step()
    drain(engine)
    for request in requests:
        prompt = tuple(request.tokens[: request.prompt_length])
        if prompt not in EXPECTED:
            EXPECTED[prompt] = by_transformers(MODEL, prompt, 6)
        assert request.sampled == EXPECTED[prompt][: len(request.sampled)]
        assert len(request.sampled) == request.max_length - request.prompt_length


def test_it_says_how_full_its_key_value_cache_is() -> None:
    model = tiny_model("llama")
    row = probe_layout(model).bytes_per_token * kv_cache.round_to_block(20)
    engine = generator(model, kv_cache_bytes=4 * row)
    for prompt in prompts_of(3, shortest=10, longest=11):
        engine.submit(prompt, SamplingParams(temperature=0.0, max_tokens=8))
    engine.step()
    assert engine.kv_cache_usage == pytest.approx(0.75)
    drain(engine)
    assert engine.kv_cache_usage == 0


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(("seconds", "chosen"), [({1: 1.0, 2: 0.9}, 1), ({1: 1.0, 2: 0.6}, 2)])
def test_several_threads_are_used_where_they_clearly_make_a_step_faster(
    monkeypatch: pytest.MonkeyPatch, seconds: dict[int, float], chosen: int
) -> None:
    now, used, choice = 0.0, list[int](), StepThreads()
    monkeypatch.setattr(scheduler.time, "perf_counter", lambda: now)
    for _ in range(20):
        with choice.use(rows=1, tokens=100):
            used.append(torch.get_num_threads())
            now += seconds[used[-1]]
        assert torch.get_num_threads() == 2
    assert set(used[:8]) == {1, 2}
    assert set(used[8:]) == {chosen}


@pytest.mark.usefixtures("two_threads")
def test_a_batch_tries_numbers_of_threads_for_each_size_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "MIN_SPEEDUP", 1e9)
    engine, used = generator(tiny_model()), list[int]()
    forward = engine.model.forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        used.append(torch.get_num_threads())
        return forward(*args, **kwargs)

    monkeypatch.setattr(engine, "_decoder", None)
    monkeypatch.setattr(engine.model, "forward", counted)
    answers(engine, [[5, 6, 7]], replace(GREEDY, max_tokens=60))
    assert used[0] == 2  # The prompt.
    assert used.count(2) < used.count(1)
    assert used[-5:] == [1] * 5
