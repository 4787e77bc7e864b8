"""Pipeline schedules as data: pure functions of numbers, one list of actions for each stage."""

from labkit.schedules.actions import Action, Schedule
from labkit.schedules.one_f_one_b import one_f_one_b

__all__ = ["Action", "Schedule", "one_f_one_b"]
