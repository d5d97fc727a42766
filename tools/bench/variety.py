"""The reward of the online benchmark: the number of different characters in a response. It is cheap, and equal for both sides."""


def variety(prompts, responses, labels, metadata):
    return of_texts(responses), {}


def of_texts(texts):
    return [len(set(text)) / 40 for text in texts]
