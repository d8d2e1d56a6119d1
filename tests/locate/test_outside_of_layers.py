"""What is judged outside of the layers: embeddings, rotation, the last norm and the head."""

import shaketable as st
from tests.locate.architectures import build, tokens


def test_rows_outside_of_the_layers_are_counted_as_judged():
    found = st.locate(build("llama"), mode="host", input_ids=tokens(n=8))
    [outside] = [probe for probe in found.probes if probe.layer is None]
    judged = {op.partition(":")[0]: counts for op, counts in outside.coverage.items()}
    assert judged.keys() >= {"lm_head", "model.norm", "model.embed_tokens"}
    assert judged["lm_head"] == {"rows": 8, "replayed": 8, "checksums": 0}
    inside = sum(counts["rows"] for probe in found.probes if probe.layer is not None for counts in probe.coverage.values())
    assert found.coverage["rows"] == inside + sum(counts["rows"] for counts in outside.coverage.values())
