"""Folders and jobs are named after their overrides."""

import pytest

from vitmnist.config.compose import make_job_name, make_run_label


@pytest.mark.parametrize(
    ("overrides", "label"),
    [
        ([], "defaults"),
        (["data/loader=gpu_slice", "batch_size=5000"], "gpu_slice-batch_size_5000"),
        (["model=cnn", "optimizer.lr=0.01", "+x=1"], "cnn-lr_0.01-x_1"),
        (["data/loader=prefetch", "data/loader@data.loader.base=disk"], "prefetch-base_disk"),
        (["data.root=/some/where", "model.x=a b/c", "~model"], "x_a_b_c-no_model"),
        (["init=" + "y" * 90], "init_" + "y" * 35),
        (["name=base", "tags=[pets]", "notes=well", "data.root=x"], "defaults"),
        (['init=<>:"|?*', "optimizer.lr=0."], "init_-lr_0"),
    ],
)
def test_folders_are_named_after_the_overrides(overrides: list[str], label: str) -> None:
    assert make_run_label(overrides) == label


def test_a_job_is_named_after_its_own_overrides_and_needs_no_quotes() -> None:
    typed = ["data.dataset.path=/ä/modern & old/{}", "optimizer.lr=1e+3", "model=cnn", "epochs=1"]
    assert make_job_name(7, typed, ["model", "epochs"]) == "7-path_modern_old_-lr_1e_3"
    assert make_job_name(7, typed[2:], ["model", "epochs"]) == "7"
    assert len(make_job_name(1000, 20 * typed, [])) <= 45
