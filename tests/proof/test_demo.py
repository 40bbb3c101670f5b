"""The demo measures each side once, so it says when other programs may slow one of them."""

from proof.demo import busy


def test_the_demo_says_when_the_machine_is_busy() -> None:
    assert busy(12.0) == ""
    assert busy(97.0).startswith("This machine is busy (97% of its cores)")
