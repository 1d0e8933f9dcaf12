"""The library: a model in this process, without a server. `from rootstock import LLM, SamplingParams`."""
