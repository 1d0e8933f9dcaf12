"""Conversations on OpenVINO GenAI's continuous batching with its prefix cache, in this process: no HTTP.

    PYTHON genai_agents.py GRAPH THREADS KV_PRECISION < conversations.json

Needs an interpreter with openvino-genai only. The input is one list of loads; a load is a list of conversations, and
a conversation {"prefix": text, "turns": [{"new": text, "answer_tokens": n}, …]}. Each turn follows the last answer.
Prints one line of JSON: for each load, `wall_s`, and for each request when it was sent, when each of its tokens came,
and the length of its prompt.
"""

import json
import sys
import time

import openvino_genai as genai

CACHE_GIB, AT_ONCE, STEP_TOKENS = 4, 32, 512


class Talk:
    """One conversation: what was said, and the handle of the answer that is being generated."""

    def __init__(self, conversation):
        self.turns = list(conversation["turns"])
        self.history = [{"role": "system", "content": conversation["prefix"]}]

    def ask(self, pipeline, number):
        turn = self.turns.pop(0)
        self.history.append({"role": "user", "content": turn["new"]})
        self.tokens, self.record = [], {"sent": time.monotonic(), "times": []}
        tokenizer = pipeline.get_tokenizer()
        text = tokenizer.apply_chat_template(self.history, add_generation_prompt=True)
        prompt = tokenizer.encode(text, add_special_tokens=False).input_ids
        self.record["prompt_tokens"] = prompt.shape[1]
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = turn["answer_tokens"], True, False
        self.handle = pipeline.add_request(number, prompt, config)

    def receive(self, pipeline):
        """Takes the tokens that have come. Returns whether the answer is complete."""
        while self.handle.can_read():
            for output in self.handle.read().values():
                self.tokens += output.generated_ids
                self.record["times"] += [time.monotonic()] * len(output.generated_ids)
        if self.handle.get_status() != genai.GenerationStatus.FINISHED or self.handle.can_read():
            return False
        answer = pipeline.get_tokenizer().decode(self.tokens)
        self.history.append({"role": "assistant", "content": answer})
        return True


def played(pipeline, load, first_number):
    began, requests = time.monotonic(), []
    talks = [Talk(conversation) for conversation in load]
    for talk in talks:
        talk.ask(pipeline, first_number + len(requests))
        requests.append(talk.record)
    while talks:
        pipeline.step()
        for talk in [each for each in talks if each.receive(pipeline)]:
            if talk.turns:
                talk.ask(pipeline, first_number + len(requests))
                requests.append(talk.record)
            else:
                talks.remove(talk)
    return {"wall_s": time.monotonic() - began, "requests": requests}


def main(graph, threads, kv_precision):
    scheduler = genai.SchedulerConfig()
    scheduler.enable_prefix_caching, scheduler.dynamic_split_fuse = True, True
    scheduler.cache_size, scheduler.max_num_seqs = CACHE_GIB, AT_ONCE
    scheduler.max_num_batched_tokens = STEP_TOKENS
    properties = {
        "INFERENCE_PRECISION_HINT": "bf16",
        "KV_CACHE_PRECISION": kv_precision,
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": threads,
    }
    pipeline = genai.ContinuousBatchingPipeline(graph, scheduler, "CPU", properties)
    results, number = [], 0
    for load in json.load(sys.stdin):
        results.append(played(pipeline, load, number))
        number += len(results[-1]["requests"])
    print(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
