"""Run the command ``allranks``, also as ``python -m allranks``."""


def main() -> None:
    """Run a verb and exit with its code; Ctrl-C while Python still imports is no traceback either."""
    try:
        from allranks.cli.main import main as run_verb

        run_verb()
    except KeyboardInterrupt:
        raise SystemExit("allranks: interrupted") from None


if __name__ == "__main__":
    main()
