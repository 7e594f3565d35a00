"""Train the ViT on MNIST.

python train.py data/loader=gpu_slice                      one run
python train.py -m data/loader=disk,ram batch_size=300     a sweep
python train.py --help                                     every group and key
"""

import sys

if __name__ == "__main__":
    try:
        from vitmnist.cli.main import main
    except KeyboardInterrupt:  # from then on `main` ends the program
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    main()
