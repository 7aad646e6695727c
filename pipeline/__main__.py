"""`expert-tier …` and `python -m pipeline …`: apart from `cli`, so that an interrupt while it loads is one line."""

import sys


def main() -> int:
    """Loads and runs the command line; returns its exit code."""
    try:
        from pipeline.cli import main as run
    except KeyboardInterrupt:
        print("expert-tier: interrupted", file=sys.stderr)
        return 1
    return run()


if __name__ == "__main__":
    sys.exit(main())
