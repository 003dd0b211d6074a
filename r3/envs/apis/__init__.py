"""The APIs of the endpoint: requests to arguments of the model, its messages to replies.

`common` has what they share. `chat`, `responses` and `messages` are three languages for one
conversation; `tokens` has the APIs without a chat template. `handlers` serves them.
"""
