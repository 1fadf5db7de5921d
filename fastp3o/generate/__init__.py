"""Sampling without training: responses chosen by their rewards, as data for the other stages."""
