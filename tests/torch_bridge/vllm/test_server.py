"""The OpenAI-compatible server with jkv's backend: requests of all kinds at once, over HTTP."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from tests.torch_bridge.vllm.engines import LAYERS, apart, needs_vllm, words
from tests.torch_bridge.vllm.serving import Client, server

pytestmark = [needs_vllm, pytest.mark.demo, pytest.mark.slow, pytest.mark.timeout(2400)]
# KL in nats between a request among others and alone: what was found in the cache is read as 4-bit pages, the rest not.
FAR, FARTHEST = 0.1, 1.0  # on the mean of an answer, and at one token


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    log = tmp_path_factory.mktemp("server") / "log"
    with server({"scheme": "rtn:bits=4"}, log, "--num-gpu-blocks-override", "24") as found:
        yield found


def assert_near(got: dict[str, Any], alone: dict[str, Any]) -> None:
    """As far as both took the same tokens, the distributions they chose from are near each other."""
    left, right = (answer["choices"][0]["logprobs"] for answer in (got, alone))
    found = []
    for a, b, x, y in zip(left["top_logprobs"], right["top_logprobs"], left["tokens"], right["tokens"], strict=True):
        found.append(apart(a, b))
        if x != y:
            break
    assert max(found) < FARTHEST and np.mean(found) < FAR, found


def served(client: Client) -> dict[str, Any]:
    """Every layer wrote and read as often as every other one."""
    counts = client.counts()
    assert counts["served"] == counts["layers"] == LAYERS
    assert counts["writes"] == counts["reads"] and len(counts["reads"]) == 1
    assert counts["nonfinite"] == 0 and counts["lost"] == [0]
    assert all(owned <= places for owned, places in zip(counts["owned"], counts["places"], strict=True))
    return counts


def test_streams_say_what_whole_answers_say(client):
    before = served(client)["reads"][0]
    prompt = words(40)
    assert "".join(client.stream(prompt, 40)) == client.complete(prompt, 40)["choices"][0]["text"]
    assert served(client)["reads"][0] >= before + 80


def test_several_samples_of_one_prompt(client):
    answer = client.complete(words(70), 40, n=3, temperature=0.8, seed=1)
    assert len(answer["choices"]) == 3
    assert len({choice["text"] for choice in answer["choices"]}) > 1
    served(client)


def test_requests_at_once_are_what_each_is_alone(client):
    prompts = [words(count, seed) for seed, count in enumerate((5, 32, 64, 100, 300, 400, 45, 200))]
    alone = [client.complete(prompt, 36) for prompt in prompts]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda prompt: client.complete(prompt, 36), prompts))
    for got, want in zip(together, alone, strict=True):
        assert_near(got, want)
    served(client)


def test_requests_come_go_and_are_cancelled(client):
    """A short soak: random requests, a third of them cancelled; what is answered is what a request alone gives."""
    soak(client, requests=24, workers=8, seed=0)


def soak(client: Client, requests: int, workers: int, seed: int) -> None:
    chance = random.Random(seed)
    jobs = [
        (words(chance.randint(3, 300), seed * 1000 + number % 12), chance.randint(1, 60), chance.random() < 0.33)
        for number in range(requests)
    ]

    def run(job: tuple[list[int], int, bool]) -> dict[str, Any] | None:
        prompt, tokens, cancel = job
        if cancel:
            client.stream(prompt, 100, stop_after=tokens % 20)
            return None
        return client.complete(prompt, tokens)

    with ThreadPoolExecutor(workers) as pool:
        answers = list(pool.map(run, jobs))
    for (prompt, tokens, _), answer in zip(jobs, answers, strict=True):
        if answer is not None:
            assert_near(answer, client.complete(prompt, tokens))
    served(client)
    end = time.monotonic() + 60  # figures are published now and then
    while client.metric("vllm:kv_cache_usage_perc") and time.monotonic() < end:
        time.sleep(1)
    assert client.metric("vllm:kv_cache_usage_perc") == client.metric("vllm:num_requests_running") == 0
