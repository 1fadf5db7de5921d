"""Responses from vLLM servers that the user has started.

servers.py        requests: limits, completions, new weights
sampler.py        a Sampler: prompts to the servers, checked responses back
publisher.py      the policy's weights to the servers, and the proof that they sample from them
nccl_transfer.py  the weights from GPU to GPU
"""
