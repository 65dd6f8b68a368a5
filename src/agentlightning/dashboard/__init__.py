"""The dashboard: runs, rollouts and tokens as web pages at `/dashboard`, each with a JSON twin at `/dashboard/api`.

`data/` reads run directories and stores, `views/` makes the JSON of each page, `static/` is the page itself (ES modules
and vendored libraries, used as they are), `app.py` serves all of it. It only reads, except for `actions.py`.
"""
