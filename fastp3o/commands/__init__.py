"""The commands, a file each, whose `main` reads the command line. The first line of a file says what it does."""
