"""Train an image classifier; by default, the ViT on MNIST.

python train.py data/loader=gpu_slice                      one run
python train.py -m data/loader=disk,ram batch_size=300     a sweep
python train.py --help                                     every group and key
"""

from vitmnist.__main__ import command_main

if __name__ == "__main__":
    command_main("train")()
