"""Responses sampled from the policy.

rollouts.py              P prompts with K responses each
sampler.py               what every sampler is: prompts -> rollouts
named_sampler.py         the sampler that a configuration names
sampling_settings.py     temperature, top-k, top-p, min-p
config.py                options of those who sample without training
end_of_sequence.py       which tokens end a response

engine_sampler.py        a sampler on the engine: batches of prompts that fit the memory
engine.py                one batch: prompts once through the policy, then a token of each response a step
queue.py                 which response each slot works on, which is next, what was sampled
cache.py                 keys and values, and attention to them
prefill.py               the prompts' way into the cache
logits.py                the head's logits in fp32
room.py                  how much fits the memory
graph.py                 a step as a CUDA graph
trial.py                 whether the engine gives a policy's own distribution

transformers_sampler.py  a sampler on transformers' generate
"""
