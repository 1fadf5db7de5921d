"""Options of objectives, and which loss each trains with. They import no torch, so that --help is
quick.
"""
