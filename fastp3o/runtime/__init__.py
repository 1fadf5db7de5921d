"""What all parts of a run share: its processes, its arithmetic, and how much memory its machine has
left.
"""
