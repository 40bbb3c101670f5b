// What Grafana's Prometheus data source does with a panel's targets: variables filled in, range queries, legends.

const VARIABLE = /\$(\w+)|\$\{(\w+)\}/g;
const LEGEND = /\{\{\s*(\w+)\s*\}\}/g;

export const filled = (text, values) => text.replace(VARIABLE, (all, plain, braced) => values[plain ?? braced] ?? all);

export const legend = (format, metric) =>
  format ? format.replace(LEGEND, (_, label) => metric[label] ?? '').trim() : (metric.__name__ ?? 'Value');

// Every variable is "All"; $__rate_interval as Grafana computes it from step and scrape interval.
export const variables = ({ step, scrape }) => ({
  instance: '.*',
  replica: '.*',
  __interval: `${step}s`,
  __rate_interval: `${Math.max(step + scrape, 4 * scrape)}s`,
});

export async function queryRange(prometheus, expr, { from, to, step }) {
  const url = new URL('/api/v1/query_range', prometheus);
  const body = new URLSearchParams({ query: expr, start: from, end: to, step });
  const answer = await (await fetch(url, { method: 'POST', body })).json();
  if (answer.status !== 'success') throw new Error(`${answer.error}\n  in: ${expr}`);
  return answer.data.result;
}

export async function panelFrames(prometheus, panel, range) {
  const values = variables(range);
  const perTarget = await Promise.all(
    (panel.targets ?? []).map(async (target) => {
      const found = await queryRange(prometheus, filled(target.expr, values), range);
      return found.map((series) => ({
        refId: target.refId,
        legend: legend(target.legendFormat, series.metric),
        labels: series.metric,
        times: series.values.map(([seconds]) => seconds * 1000),
        values: series.values.map(([, value]) => Number(value)).map((value) => (Number.isFinite(value) ? value : null)),
      }));
    }),
  );
  return perTarget.flat();
}

// An annotation query marks every step at which it is above 0; one mark where a run of steps begins.
export async function marks(prometheus, annotation, range) {
  const found = await queryRange(prometheus, filled(annotation.expr, variables(range)), range);
  return found.flatMap((series) => {
    const times = series.values.filter(([, value]) => Number(value) > 0).map(([seconds]) => seconds);
    const begins = times.filter((at, i) => (i ? at - times[i - 1] > range.step * 1.5 : at > range.from));
    return begins.map((at) => ({ at: at * 1000, color: annotation.iconColor, title: legend(annotation.titleFormat, series.metric) }));
  });
}
