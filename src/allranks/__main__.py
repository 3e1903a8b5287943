"""Run the command ``allranks`` as ``python -m allranks``."""

from allranks.cli.main import main

if __name__ == "__main__":
    main()
