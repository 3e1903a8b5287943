"""``python -m allranks`` does what the command ``allranks`` does."""

from allranks.cli.main import main

if __name__ == "__main__":
    main()
