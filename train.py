"""Train an image classifier; by default, the ViT on MNIST.

python train.py data/loader=gpu_slice                      one run
python train.py -m data/loader=disk,ram batch_size=300     a sweep
python train.py --help                                     every group and key

From here to the gradients: `main` (vitmnist/cli/train.py), `start_run` (vitmnist/cli/start.py), `Trainer.fit`
(vitmnist/trainer.py), `train_epoch` (vitmnist/training/loop.py), `forward_backward` (vitmnist/training/step.py), and
`ForwardPass.forward` (vitmnist/training/model_runner.py), which calls the model and the loss.
"""

from vitmnist.__main__ import command_main

if __name__ == "__main__":
    command_main("train")()
