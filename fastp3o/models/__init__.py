"""Hugging Face models over packed rows.

packed_model.py  policy, reference or reward model: hidden states -> log-probabilities, loss or scores
attention.py     attention over the segments of a row: flash-attn, torch's varlen_attn, SDPA
packable.py      which models give packed rows what each sequence gets alone
loading.py       tokenizers and models as the stages take them
checkpoint.py    reading their folders; broken and incomplete ones are refused
reference.py     the policy that the KL is measured against
trainable.py     which parameters train: all, the top layers, LoRA
"""
