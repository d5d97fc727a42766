"""The reward of the online benchmark, cheap and the same for both sides: how many different characters a response has."""


def variety(prompts, responses, labels, metadata):
    return of_texts(responses), {}


def of_texts(texts):
    return [len(set(text)) / 40 for text in texts]
