"""The sub-commands of `pdproxy`, for operators. None of them serves requests.

doctor       examines a fleet
launch       writes the commands that start a fleet
roll         restarts the instances of a role
top          shows what a gateway does
advise       says which side of the fleet is the bottleneck
completion   completes commands in a shell
"""
