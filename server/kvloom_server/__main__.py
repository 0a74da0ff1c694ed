"""``kvloom`` and ``python -m kvloom_server``."""

import sys


def main() -> None:
    """Run the command line."""
    try:
        from .cli import app  # not above: the SDK alone has no command line
    except ModuleNotFoundError as error:
        sys.exit(
            f"error: {error.name} is missing. The command line needs the extra: "
            "pip install 'kvloom[server]', or '.[server]' in a checkout"
        )
    app()


if __name__ == "__main__":
    main()
