"""B5: bytes of the checkpoints after B4's conversation of one agent, over the bytes of the useful ones.

A position is useful if one of the agent's requests parted there from earlier tokens, or if, by the template's rules,
its next question will, or if another conversation under the same system prompt can. Each counts once, and two within
four tokens count as one. A checkpoint's bytes are a copy of the recurrent state on the hybrid. On sliding windows,
where neighbours share blocks, they are the distinct blocks that checkpoints hold, and the useful bytes are the
distinct blocks that the useful positions need.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from agent_world import BLOCK_SIZE, TOOLS, Agent, Asked, World, served
from b4_agents import AMPLE_BYTES, RULES, SEED
from common import argument_parser, at_most, conclude

from checkpoints import save_chat
from rootstock.cache.families import Family, FullAttention, RecurrentState, row_bytes
from rootstock.text.conversation.openai import conversation_of
from rootstock.text.conversation.template import template_input
from rootstock.text.prompts.boundaries import boundaries_of
from rootstock.text.prompts.prompt_tokenizer import PromptTokenizer, placed_chat
from rootstock.text.prompts.text_alignment import shared

NEAR_TOKENS = 4

Place = tuple[int, int]  # index of a request, position in its tokens


def useful_places(world: World, agent: Agent) -> list[Place]:
    """Returns the useful positions, each with the first request that has these tokens."""
    asked, model_tokenizer = world.asked, world.made.tokenizer
    places = [(at, request.best) for at, request in enumerate(asked) if request.best]
    agent.messages.append({"role": "user", "content": "And now?"})
    template = template_input(conversation_of(agent.messages, TOOLS), model_tokenizer)
    tokenizer = PromptTokenizer(model_tokenizer, world.made.engine.context_limit)
    _, placed = placed_chat(template, tokenizer)
    system = boundaries_of(model_tokenizer, template, placed)[0].position
    next_turn = max(shared(request.whole, placed.tokens) for request in asked)
    places += [(len(asked) - 1, system), (len(asked) - 1, next_turn)]
    return _distinct(_first_that_has(asked, place) for place in places)


def _first_that_has(asked: Sequence[Asked], place: Place) -> Place:
    at, position = place
    prefix = asked[at].whole[:position]
    return next(
        (i, position) for i in range(at + 1) if shared(asked[i].whole, prefix) >= min(position, len(prefix))
    )


def _distinct(places: Iterable[Place]) -> list[Place]:
    kept: list[Place] = []
    for at, position in sorted(places):
        if position and not any(at == a and position - p < NEAR_TOKENS for a, p in kept):
            kept.append((at, position))
    return kept


def useful_bytes(places: Sequence[Place], asked: Sequence[Asked], families: Sequence[Family]) -> int:
    total = 0
    for family in families:
        if isinstance(family, RecurrentState):
            total += len(places) * family.bytes_per_state
        elif not isinstance(family, FullAttention):
            blocks = {
                asked[at].whole[: min(position, (block + 1) * BLOCK_SIZE)].tobytes()
                for at, position in places
                for block in range(family.first_visible(position) // BLOCK_SIZE, -(-position // BLOCK_SIZE))
            }
            total += len(blocks) * row_bytes(family, BLOCK_SIZE)
    return total


def of_model(model: Path, turns: int, steps: int) -> dict[str, float]:
    with served(model, AMPLE_BYTES) as world:
        agent = Agent("Ann", RULES, turns, steps, SEED)
        world.run_alone(agent)
        cache = world.made.engine.stats().cache
        places = useful_places(world, agent)
        useful = useful_bytes(places, world.asked, world.made.description.families)
    print(
        f"{model.name}: {cache.checkpoints} checkpoints of {cache.checkpoint_bytes:,} bytes, {len(places)} useful "
        f"positions of {useful:,} bytes: {places}"
    )
    return {
        "checkpoints": cache.checkpoints,
        "checkpoint_bytes": cache.checkpoint_bytes,
        "useful_positions": len(places),
        "useful_bytes": useful,
        "ratio": round(cache.checkpoint_bytes / useful, 4),
    }


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="tool calls of a turn")
    options = parser.parse_args()
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for name in ("states", "windows"):
            found = of_model(save_chat(Path(temporary) / name, name), options.turns, options.steps)
            figures |= {f"{name}_{figure}": value for figure, value in found.items()}
    conclude("B5", figures, {"states_ratio": at_most(2.0), "windows_ratio": at_most(2.0)})


if __name__ == "__main__":
    main()
