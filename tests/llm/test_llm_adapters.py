"""LoRA adapters of a library: each call chooses one by its name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from checkpoints import save_served, tiny_model
from llm.conftest import Oracle
from lora import linears_of, merge, save_adapter
from rootstock import LLM, SamplingParams
from rootstock.errors import AdapterNotLoaded, InvalidOption, InvalidParameter

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPT = list(range(40, 60))


def test_a_call_chooses_an_adapter_by_its_name(one: Oracle, tmp_path: Path) -> None:
    model = tiny_model("llama")
    one.llm.load_adapter("a", save_adapter(tmp_path / "a", model, linears_of(model, "q_proj")))
    base, adapted = one.llm.generate(PROMPT, GREEDY)[0], one.llm.generate(PROMPT, GREEDY, adapter="a")[0]
    assert base.outputs[0].token_ids == one.answer(PROMPT, 6)
    assert adapted.outputs[0].token_ids != base.outputs[0].token_ids
    assert adapted.cached_tokens == 0
    assert one.llm.explain(PROMPT, adapter="a").matched_tokens == len(PROMPT) - 1
    streamed = "".join(delta.text for delta in one.llm.stream(PROMPT, GREEDY, adapter="a"))
    assert streamed == adapted.text
    messages = [{"role": "user", "content": "hello"}]
    assert one.llm.chat(messages, GREEDY, adapter="a")[0].text != one.llm.chat(messages, GREEDY)[0].text
    one.llm.unload_adapter("a")
    with pytest.raises(InvalidParameter, match="no adapter is loaded"):
        one.llm.generate(PROMPT, GREEDY, adapter="a")
    with pytest.raises(AdapterNotLoaded):
        one.llm.unload_adapter("a")


def test_adapters_of_a_loaded_model(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    checkpoint = save_served(tmp_path / "m")

    def own() -> AutoModelForCausalLM:
        return AutoModelForCausalLM.from_pretrained(checkpoint).eval()

    made = save_adapter(tmp_path / "a", own(), linears_of(own()), size=0.3)
    with LLM(
        str(checkpoint), dtype="float32", device="cpu", budget_bytes="8MiB", adapters={"mine": made}
    ) as llm:
        prompt = np.arange(10, 30, dtype=np.int32)
        for name, model in ((None, own()), ("mine", merge(own(), made))):
            import torch

            ids = torch.from_numpy(prompt.astype(np.int64))[None]
            out = model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
            answer = llm.generate(prompt, GREEDY, adapter=name)[0]
            assert list(answer.outputs[0].token_ids) == out[0, len(prompt) :].tolist()


def test_names_are_checked(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="adapters"):
        LLM("nothing", adapters={"": tmp_path})
