"""Responses sampled from the policy.

rollouts.py              P prompts with K responses each
sampler.py               what every sampler is: prompts -> rollouts
transformers_sampler.py  a sampler on transformers' generate
"""
