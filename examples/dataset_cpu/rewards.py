"""A reward of one's own: the parameters name what is wanted of the answer and of the row."""


def running_sums(response: str, digits: str) -> dict:
    """The share of the running sums that are right, from the first one on."""
    right = 0
    for end, written in enumerate(response[: len(digits)], start=1):
        if written != str(sum(map(int, digits[:end])) % 10):
            break
        right += 1
    return {"reward": right / len(digits), "info": {"written": len(response)}}
