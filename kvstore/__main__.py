"""`python -m kvstore`."""

from kvstore.cli import main

if __name__ == "__main__":
    main()
