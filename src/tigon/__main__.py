"""`python -m tigon` is the command `tigon`."""

from tigon.cli import main

if __name__ == "__main__":
    main()
