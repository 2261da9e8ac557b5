from train.monitor.metrics import describe_validation


def test_a_validation_stays_on_one_line_whatever_the_window() -> None:
    """objective.L=500 printed 500 percentages."""
    accuracies = {f"accuracy_{offset}": 1 / (1 + offset) for offset in range(501)}
    metrics = {"standard_loss": 1.0, "masked_loss": 2.0, "accepted": 1.5, **accuracies}
    line = describe_validation(metrics)
    assert line.endswith("accuracy by offset 50 33 25 20 17 14 12 11 10 9 ... 0 (the last of 500) %")
    ten = {"standard_loss": 1.0, "masked_loss": 2.0, "accepted": 1.5, **dict(list(accuracies.items())[:11])}
    assert describe_validation(ten).endswith("11 10 9 %")
