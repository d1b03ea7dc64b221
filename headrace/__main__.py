"""`python -m headrace` runs the command line."""

from headrace.services.operate.cli import main

if __name__ == "__main__":
    main()
