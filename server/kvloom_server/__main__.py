"""``kvloom`` and ``python -m kvloom_server``."""

from .cli import app


def main() -> None:
    """Run the command line."""
    app()


if __name__ == "__main__":
    main()
