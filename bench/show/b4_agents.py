"""B4: cached tokens of agents' conversations on models that cannot resume at every position, of the most possible.

System prompt and tools, then turns of question, reasoning, tool call, tool result, …, answer, where the next question
drops the reasoning of the turn before; over HTTP, on a hybrid of recurrent states and on one of sliding windows. The
best possible of a request is the longest prefix that it shares with an earlier prompt or answer, as if every position
could be resumed at and nothing were evicted. For one agent, every request from the second on must find 95 % of it.

Then four agents, one to four of them at a time in random order, in three quarters of the memory that they use when it
is ample; and, without a bar, in the memory of three of their conversations at their longest. They are compared with
the same best and with a clairvoyant cache of that size: tokens are its pages, it evicts those that are needed last
(Belady 1966, optimal for pages of one size), it pays for K and V of full attention, for one checkpoint and for one
running request, but not for windows or any further states. No cache within the budget finds more.

Finding the boundaries of a prompt of 100 messages may take 5 ms more than rendering and tokenizing it.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from agent_world import TOOLS, Agent, Asked, message_of, served
from agent_world import prose as prose_of
from common import argument_parser, at_least, at_most, conclude

from checkpoints import save_chat
from rootstock.cache.families import FullAttention
from rootstock.runtime.base import ModelDescription
from rootstock.server.models.model_card import bytes_per_checkpoint
from rootstock.text.conversation.openai import conversation_of
from rootstock.text.conversation.template import template_input
from rootstock.text.prompts.boundaries import boundaries_of
from rootstock.text.prompts.prompt_tokenizer import PromptTokenizer, placed_chat
from rootstock.text.prompts.text_alignment import shared
from rootstock.text.tokenizer import HFTokenizer

AGENTS = ("Ann", "Ben", "Cid", "Dan")
RULES = prose_of(random.Random(1), 150)
AMPLE_BYTES = 256 << 20
SEED = 4


def agents(turns: int, steps: int) -> list[Agent]:
    return [Agent(name, RULES, turns, steps, SEED) for name in AGENTS]


def clairvoyant(asked: Sequence[Asked], capacity_tokens: int) -> int:
    """Counts the prompt tokens that the best cache of so many tokens would find, if it knew all later requests."""
    ids: list[
        np.ndarray
    ] = []  # for each request an id per token: equal for equal tokens after equal prefixes
    unused = 0
    for request in asked:
        whole = request.whole
        common, like = max(((shared(whole, asked[i].whole), i) for i in range(len(ids))), default=(0, 0))
        own = np.arange(unused, unused + len(whole) - common)
        unused += len(own)
        ids.append(np.concatenate((ids[like][:common], own)) if common else own)
    never = len(asked)
    next_use = np.full((len(asked) + 1, unused), never)
    for at in range(len(asked) - 1, -1, -1):
        next_use[at] = next_use[at + 1]
        next_use[at, ids[at][: len(asked[at].prompt)]] = at
    held = np.zeros(unused, bool)
    found = 0
    for at, request in enumerate(asked):
        prompt = ids[at][: len(request.prompt)]
        found += min(int(held[prompt].sum()), len(prompt) - 1)
        held[ids[at]] = True
        held &= next_use[at + 1] < never
        if held.sum() > capacity_tokens:
            kept = np.flatnonzero(held)
            kept = kept[np.argsort(next_use[at + 1][kept], kind="stable")][:capacity_tokens]
            held[:] = False
            held[kept] = True
    return found


def tokens_in(budget_bytes: int, described: ModelDescription, block_size: int) -> int:
    """Returns the tokens of full attention that a budget pays for beside a checkpoint and a running request."""
    once = bytes_per_checkpoint(described.families, block_size)
    return (budget_bytes - 2 * once) // full_bytes_per_token(described)


def full_bytes_per_token(described: ModelDescription) -> int:
    (full,) = (family for family in described.families if isinstance(family, FullAttention))
    return full.bytes_per_token


def bytes_of_three(asked: Sequence[Asked], described: ModelDescription, block_size: int) -> int:
    """Returns the bytes of three agents' conversations at their longest, with their common prefix once: K and V of
    full attention, and for each agent the windows and states of a checkpoint and of a running request."""
    longest = [max((r.whole for r in asked if r.agent == name), key=len) for name in AGENTS]
    tokens, before = 0, list[np.ndarray]()
    for whole in longest[:3]:
        tokens += len(whole) - max((shared(whole, other) for other in before), default=0)
        before.append(whole)
    once = bytes_per_checkpoint(described.families, block_size)
    return tokens * full_bytes_per_token(described) + 3 * 2 * once


def of_one(model: Path, turns: int, steps: int) -> dict[str, float]:
    with served(model, AMPLE_BYTES) as world:
        world.run_alone(agents(turns, steps)[0])
        asked = world.asked
    print(f"\n{model.name}, one agent\n   prompt  cached  best possible")
    for request in asked:
        ratio = f"{request.cached / request.best:.3f}" if request.best else "-"
        print(f"   {len(request.prompt):6} {request.cached:7} {request.best:7}  {ratio}")
    later = asked[1:]
    return {
        "one_least_of_a_request": round(min(request.cached / request.best for request in later), 4),
        "one_total": round(sum(r.cached for r in later) / sum(r.best for r in later), 4),
    }


def of_four(model: Path, turns: int, steps: int) -> dict[str, float]:
    with served(model, AMPLE_BYTES) as world:
        world.run_interleaved(agents(turns, steps), SEED)
        cache, described = world.made.engine.stats().cache, world.made.description
        needed, three = cache.used_bytes, bytes_of_three(world.asked, described, cache.block_size)
    figures: dict[str, float] = {"four_needed_bytes": needed}
    for name, budget in (("three_quarters", needed * 3 // 4), ("three", three)):
        with served(model, budget) as world:
            world.run_interleaved(agents(turns, steps), SEED)
            asked, cache = world.asked, world.made.engine.stats().cache
        capacity = tokens_in(budget, described, cache.block_size)
        cached, best = sum(request.cached for request in asked), sum(request.best for request in asked)
        optimum = clairvoyant(asked, capacity)
        print(
            f"\n{model.name}, four agents in {budget:,} bytes, of {needed:,} that they use with ample memory:\n"
            f"   {cached:,} tokens of {len(asked)} prompts found, {optimum:,} by a clairvoyant cache of "
            f"{capacity:,} tokens, {best:,} without a limit;\n   {cache.evicted_tokens:,} tokens and "
            f"{cache.checkpoints_evicted} of {cache.checkpoints_taken} checkpoints evicted, "
            f"{cache.checkpoints_skipped} skipped, {cache.preemptions} requests preempted"
        )
        figures |= {
            f"{name}_bytes": budget,
            f"{name}_of_unlimited": round(cached / best, 4),
            f"{name}_of_clairvoyant": round(cached / optimum, 4),
            f"{name}_clairvoyant_of_unlimited": round(optimum / best, 4),
        }
    return figures


def boundaries_ms(model: Path) -> dict[str, float]:
    """Measures processor time for 100 messages of one long turn of tool calls, the costliest kind."""
    model_tokenizer = HFTokenizer.load(str(model))
    tokenizer = PromptTokenizer(model_tokenizer, limit_tokens=10**6)
    agent = Agent("Ann", RULES, 1, 49, SEED)
    while len(agent.messages) < 100:
        agent.heard(message_of(agent.will_say(), f"call{len(agent.messages)}"))
    template = template_input(conversation_of(agent.messages, TOOLS), model_tokenizer)
    prompt_ms, own_ms = [], []
    for _ in range(40):
        tokenizer.forget(None)  # the text is new each time
        began = time.thread_time()
        _, placed = placed_chat(template, tokenizer)
        half = time.thread_time()
        boundaries_of(model_tokenizer, template, placed)
        prompt_ms.append(1e3 * (half - began))
        own_ms.append(1e3 * (time.thread_time() - half))
    print(
        f"\n{len(agent.messages)} messages, {len(placed.tokens)} tokens:",
        boundaries_of(model_tokenizer, template, placed),
    )
    return {
        "prompt_of_100_messages_ms": round(statistics.median(prompt_ms), 2),
        "boundaries_of_100_messages_ms": round(statistics.median(own_ms), 2),
    }


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="tool calls of a turn")
    options = parser.parse_args()
    figures: dict[str, float] = {}
    bars = {}
    with tempfile.TemporaryDirectory() as temporary:
        for name in ("states", "windows"):
            model = save_chat(Path(temporary) / name, name)
            of_model = of_one(model, options.turns, options.steps)
            of_model |= of_four(model, options.turns, options.steps)
            figures |= {f"{name}_{figure}": value for figure, value in of_model.items()}
            if not bars:
                figures |= boundaries_ms(model)
                bars["boundaries_of_100_messages_ms"] = at_most(5.0)
            for judged in ("one_least_of_a_request", "one_total", "three_quarters_of_clairvoyant"):
                bars[f"{name}_{judged}"] = at_least(0.95)
    conclude("B4", figures, bars)


if __name__ == "__main__":
    main()
