"""`python -m tigon.cli` is the command `tigon`, as `python -m tigon` is."""

from tigon.cli import main

if __name__ == "__main__":
    main()
