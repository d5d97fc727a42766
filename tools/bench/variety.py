"""The reward of the online benchmark, cheap and equal for both sides: the number of different characters in a response."""


def variety(prompts, responses, labels, metadata):
    return of_texts(responses), {}


def of_texts(texts):
    return [len(set(text)) / 40 for text in texts]
