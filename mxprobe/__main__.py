"""`python -m mxprobe`: the same command line, for when the script is not on PATH."""

from mxprobe.cli import main

if __name__ == "__main__":
    main()
