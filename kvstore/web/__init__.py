"""One page that shows what happens in a store, its data as JSON, and metrics for scrapers; on loopback alone.

    with serve_http(store.snapshot, port=9464) as server:
        print(server.url)

    /                the page: one file, which loads nothing from elsewhere
    /snapshot.json   a `Snapshot`
    /metrics         OpenMetrics or Prometheus text, see `kvstore.watch.metrics`

`grafana.json` beside this file is a dashboard for the metrics.
"""

from .server import HttpServer as HttpServer
from .server import page as page
from .server import serve_http as serve_http
