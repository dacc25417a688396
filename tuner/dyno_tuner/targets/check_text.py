"""A passage of code and prose for comparing answers. Its content does not matter, but it must resemble real
use, because routers behave differently on random tokens."""

TEXT = '''
def merge_intervals(intervals):
    """Merge overlapping intervals and return them sorted by start."""
    if not intervals:
        return []
    ordered = sorted(intervals, key=lambda pair: pair[0])
    merged = [list(ordered[0])]
    for start, end in ordered[1:]:
        last = merged[-1]
        if start <= last[1]:
            last[1] = max(last[1], end)
        else:
            merged.append([start, end])
    return merged


class Counter:
    """Counts words of a text; case does not matter."""

    def __init__(self, text=""):
        self.counts = {}
        for word in text.lower().split():
            self.add(word.strip(".,;:!?"))

    def add(self, word, times=1):
        if word:
            self.counts[word] = self.counts.get(word, 0) + times

    def most_common(self, n=10):
        return sorted(self.counts.items(), key=lambda item: (-item[1], item[0]))[:n]


import json
import pathlib

def load_settings(path, defaults=None):
    settings = dict(defaults or {})
    try:
        with open(path, encoding="utf-8") as handle:
            settings.update(json.load(handle))
    except FileNotFoundError:
        print(f"{path} does not exist, using defaults")
    return settings

The river rises in the hills above the town and falls, over some forty miles, to a shallow bay where
boats of every size lie at anchor. In spring the water is brown and quick; by late summer a child
can wade across it at the old mill. Water boils at 100 degrees Celsius at sea level, and at about 71
on the summit of Everest. Why? Because the pressure of the air is lower there, fewer molecules push
back, and the liquid needs less energy to turn into vapour.
'''
