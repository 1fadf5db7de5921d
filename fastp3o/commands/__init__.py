"""Commands that do more than read a configuration, a file each, whose `main` reads the command
line.
"""
