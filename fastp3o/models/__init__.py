"""Hugging Face models over packed rows.

packed_model.py  policy, reference or reward model: hidden states -> log-probabilities, loss or scores
attention.py     attention over the segments of a row: flash-attn, torch's varlen_attn, SDPA
packable.py      which models give packed rows what each sequence gets alone
loading.py       tokenizers and models from checkpoints
reference.py     the policy that the KL is measured against
trainable.py     which parameters train: all, the top layers, LoRA
"""
