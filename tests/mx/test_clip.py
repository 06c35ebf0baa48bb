import pytest
import torch

from paceline.mx.gluon.clip import clip_global_norm


def test_norm_over_all_arrays_is_clipped_in_place():
    arrays = [torch.full((3,), 2.0), torch.full((2, 2), 2.0)]
    assert clip_global_norm(arrays, 1.0) == pytest.approx(28**0.5)
    assert torch.cat([one.flatten() for one in arrays]).norm() == pytest.approx(1.0, abs=1e-6)


def test_small_norm_is_left_alone():
    arrays = [torch.tensor([0.3, 0.4])]
    assert clip_global_norm(arrays, 1.0) == pytest.approx(0.5)
    assert arrays[0].tolist() == pytest.approx([0.3, 0.4])


def test_nan_warns_and_changes_nothing():
    arrays = [torch.tensor([float("nan"), 5.0])]
    with pytest.warns(UserWarning, match="nothing was clipped"):
        clip_global_norm(arrays, 1.0)
    assert arrays[0][1] == 5.0


@pytest.mark.parametrize(("arrays", "max_norm"), [([], 1.0), ([torch.ones(1)], 0.0)])
def test_senseless_calls_are_refused(arrays, max_norm):
    with pytest.raises(ValueError, match=r"clip|max_norm"):
        clip_global_norm(arrays, max_norm)
