"""SetFit: an Engine as the body, with a head of scikit-learn."""

# mypy: disable-error-code="import-not-found"
from __future__ import annotations

from setfit import SetFitModel
from sklearn.linear_model import LogisticRegression

from tests.sbert_infer.integrations.libraries.given import FOLDER, LABELS, TEXTS, minilm, same

model = SetFitModel(model_body=minilm, model_head=LogisticRegression())
model.fit(TEXTS[::2], LABELS[::2], num_epochs=1)
right = [found == label for found, label in zip(model.predict(TEXTS[1::2]), LABELS[1::2], strict=True)]
assert sum(right) > 0.9 * len(right)
same(model.encode(TEXTS[:5]), minilm.encode(TEXTS[:5]))
assert model.predict_proba(TEXTS[:3]).shape == (3, 4)
assert model.predict("a recipe for tomato sauce") == "cooking"
assert str(model.to("cpu").device) == "cpu"
try:
    model.save_pretrained(str(FOLDER))
except AttributeError as error:
    assert "copy" in str(error)  # noqa: PT017
else:
    raise AssertionError("an engine can't be saved as a checkpoint")
