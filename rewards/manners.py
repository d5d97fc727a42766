"""An example of a scorer of kind function: docs/scorers.md."""


def calm(prompts, responses, labels, metadata):
    scores = []
    for response, label in zip(responses, labels, strict=True):
        if label is None:
            scores.append(None)  # not to be scored
        else:
            scores.append((label in response) * (0.5 if "!" in response else 1.0))
    exclamations = sum("!" in response for response in responses) / len(responses)
    return scores, {"exclamations": exclamations}
