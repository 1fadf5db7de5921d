"""P3O in other trainers: one module for each, which needs that trainer installed. No other module
of fastp3o does.
"""
