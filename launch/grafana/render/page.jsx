// The dashboard on one page: Grafana's components for everything but the state timeline, which its packages do not export.
import {
  applyFieldOverrides,
  createTheme,
  dateTime,
  FieldColorModeId,
  FieldConfigOptionsRegistry,
  FieldType,
  getDisplayProcessor,
  getFieldDisplayValues,
  identityOverrideProcessor,
  toDataFrame,
} from '@grafana/data';
import { BarGauge, BigValue, GlobalStyles, PanelChrome, TimeSeries } from '@grafana/ui';
import { createRoot } from 'react-dom/client';

const { dashboard, frames, marks, range } = window.RENDER;
const theme = createTheme({ colors: { mode: 'dark' } });
const [WIDTH, CELL, GAP] = [1600, 30, 8];
const COLUMN = (WIDTH + GAP) / 24;
const timeRange = {
  from: dateTime(range.from * 1000),
  to: dateTime(range.to * 1000),
  raw: { from: dateTime(range.from * 1000), to: dateTime(range.to * 1000) },
};

// Grafana registers these options in its core; values pass through unchanged.
const option = (path, isCustom) => ({
  id: isCustom ? `custom.${path}` : path,
  path,
  isCustom,
  name: path,
  override: () => null,
  editor: () => null,
  process: identityOverrideProcessor,
  shouldApply: () => true,
});
const registry = new FieldConfigOptionsRegistry();
['unit', 'min', 'max', 'decimals', 'displayName', 'color', 'thresholds', 'mappings', 'noValue'].forEach((id) =>
  registry.register(option(id, false)),
);
const LINE_DEFAULTS = { drawStyle: 'line', lineInterpolation: 'linear', pointSize: 5, axisPlacement: 'auto', spanNulls: false };
const customOptions = dashboard.panels.flatMap((panel) => Object.keys(panel.fieldConfig?.defaults.custom ?? {}));
new Set([...Object.keys(LINE_DEFAULTS), ...customOptions, 'lineStyle', 'stacking']).forEach((id) =>
  registry.register(option(id, true)),
);

function dataOf(panel) {
  const defaults = {
    color: { mode: panel.type === 'timeseries' ? FieldColorModeId.PaletteClassic : FieldColorModeId.Thresholds },
    ...panel.fieldConfig.defaults,
  };
  defaults.custom = { ...(panel.type === 'timeseries' ? LINE_DEFAULTS : {}), ...defaults.custom };
  const data = frames[panel.id].map((series) =>
    toDataFrame({
      refId: series.refId,
      fields: [
        { name: 'Time', type: FieldType.time, values: series.times, config: { interval: range.step * 1000 } },
        {
          name: 'Value',
          type: FieldType.number,
          values: series.values,
          labels: series.labels,
          config: { displayNameFromDS: series.legend },
        },
      ],
    }),
  );
  return applyFieldOverrides({
    data,
    fieldConfig: { defaults, overrides: panel.fieldConfig.overrides ?? [] },
    replaceVariables: (text) => text,
    theme,
    fieldConfigRegistry: registry,
    timeZone: 'utc',
  });
}

const NoData = ({ width, height }) => (
  <div style={{ width, height, display: 'grid', placeItems: 'center', color: theme.colors.text.secondary }}>No data</div>
);

function drawMarks(builder) {
  builder.addHook('draw', (plot) => {
    const { ctx, bbox } = plot;
    ctx.save();
    for (const { at, color } of marks) {
      const x = Math.round(plot.valToPos(at, 'x', true));
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.strokeStyle = ctx.fillStyle = theme.visualization.getColorByName(color);
      ctx.setLineDash([5, 5]);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      ctx.beginPath();
      ctx.moveTo(x - 5, bbox.top + bbox.height + 7);
      ctx.lineTo(x + 5, bbox.top + bbox.height + 7);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.fill();
    }
    ctx.restore();
  });
  return null;
}

const Lines = ({ panel, width, height }) => {
  const legend = { showLegend: true, calcs: [], ...panel.options.legend };
  return (
    <TimeSeries frames={dataOf(panel)} legend={legend} width={width} height={height} timeRange={timeRange} timeZone="utc">
      {drawMarks}
    </TimeSeries>
  );
};

const displayed = (panel, sparkline) =>
  getFieldDisplayValues({
    fieldConfig: panel.fieldConfig,
    reduceOptions: panel.options.reduceOptions ?? { calcs: ['lastNotNull'] },
    replaceVariables: (text) => text,
    theme,
    data: dataOf(panel),
    sparkline,
    timeZone: 'utc',
  });

const Number_ = ({ panel, width, height }) => {
  const values = displayed(panel, panel.options.graphMode !== 'none');
  const tall = panel.options.textMode === 'name';
  return (
    <div style={{ display: 'flex', flexDirection: tall ? 'column' : 'row' }}>
      {values.map((value, i) => (
        <BigValue
          key={i}
          width={tall ? width : width / values.length}
          height={tall ? height / values.length : height}
          value={value.display}
          sparkline={value.sparkline}
          count={values.length}
          colorMode={panel.options.colorMode}
          graphMode={panel.options.graphMode}
          textMode={panel.options.textMode ?? 'auto'}
          text={panel.options.text}
          justifyMode="auto"
          theme={theme}
        />
      ))}
    </div>
  );
};

const Bars = ({ panel, width, height }) => {
  const values = displayed(panel, false);
  const widest = Math.max(...values.map((value) => value.display.title.length));
  return values.map((value, i) => (
    <BarGauge
      key={i}
      width={width}
      height={height / values.length - 6}
      itemSpacing={6}
      field={value.field}
      display={value.view?.getFieldDisplayProcessor(value.colIndex)}
      value={value.display}
      alignmentFactors={{ title: 'x'.repeat(widest), text: '0.000' }}
      orientation={panel.options.orientation}
      displayMode={panel.options.displayMode}
      showUnfilled
      theme={theme}
    />
  ));
};

// Round times, eight at most.
function ticks() {
  const every = [15, 30, 60, 300, 900, 3600, 21600].find((step) => (range.to - range.from) / step <= 8) ?? 86400;
  const first = Math.ceil((range.from + every / 4) / every) * every;
  return Array.from({ length: Math.ceil((range.to - every / 4 - first) / every) }, (_, i) => first + i * every);
}

// Ours: one bar a series, a box for each run of equal values.
const States = ({ panel, width, height }) => {
  const names = 20 + 7 * Math.max(...frames[panel.id].map((series) => series.legend.length));
  const x = (ms) => names + ((ms / 1000 - range.from) / (range.to - range.from)) * (width - names);
  const data = dataOf(panel);
  const row = Math.min(46, (height - 22) / Math.max(1, data.length));
  return (
    <svg width={width} height={height} fontFamily={theme.typography.fontFamily} fontSize={12}>
      {data.map((frame, line) => {
        const [time, value] = frame.fields;
        const show = getDisplayProcessor({ field: value, theme });
        const runs = [];
        time.values.forEach((at, i) => {
          const last = runs.at(-1);
          const end = at + range.step * 1000;
          if (last && last.value === value.values[i] && at <= last.end + 1) last.end = end;
          else runs.push({ value: value.values[i], begin: at, end });
        });
        return (
          <g key={line} transform={`translate(0 ${line * row})`}>
            <text x={names - 10} y={row / 2 + 4} textAnchor="end" fill={theme.colors.text.primary}>
              {value.config.displayNameFromDS}
            </text>
            {runs.map((run, i) => {
              const state = show(run.value);
              const wide = x(run.end) - x(run.begin);
              return (
                <g key={i}>
                  <rect x={x(run.begin)} y={row * 0.1} width={wide} height={row * 0.8} fill={state.color} opacity={0.85} />
                  {wide > 50 && (
                    <text x={x(run.begin) + 6} y={row / 2 + 4} fill="#111">
                      {state.text}
                    </text>
                  )}
                </g>
              );
            })}
          </g>
        );
      })}
      {marks.map(({ at, color }, i) => (
        <line key={i} x1={x(at)} x2={x(at)} y1={0} y2={height - 20} strokeDasharray="5 5" stroke={theme.visualization.getColorByName(color)} />
      ))}
      {ticks().map((seconds) => (
        <text key={seconds} x={x(seconds * 1000)} y={height - 4} fill={theme.colors.text.secondary} textAnchor="middle">
          {new Date(seconds * 1000).toISOString().slice(11, 19)}
        </text>
      ))}
    </svg>
  );
};

const KINDS = { timeseries: Lines, stat: Number_, bargauge: Bars, 'state-timeline': States };

const Panel = ({ panel, top }) => {
  const { x, y, w, h } = panel.gridPos;
  const [width, height] = [w * COLUMN - GAP, h * (CELL + GAP) - GAP];
  const Kind = KINDS[panel.type];
  const empty = frames[panel.id].length === 0;
  return (
    <div style={{ position: 'absolute', left: x * COLUMN, top: (y - top) * (CELL + GAP), width, height }}>
      <PanelChrome title={panel.title} description={panel.description} width={width} height={height}>
        {(innerWidth, innerHeight) =>
          empty ? <NoData width={innerWidth} height={innerHeight} /> : <Kind panel={panel} width={innerWidth} height={innerHeight} />
        }
      </PanelChrome>
    </div>
  );
};

const rows = dashboard.panels.reduce((found, panel) => {
  if (panel.type === 'row') found.push({ row: panel, panels: [] });
  else found.at(-1).panels.push(panel);
  return found;
}, []);

createRoot(document.getElementById('root')).render(
  <>
    <GlobalStyles />
    {rows.map(({ row, panels }) => {
      const top = row.gridPos.y + 1;
      const bottom = Math.max(...panels.map(({ gridPos }) => gridPos.y + gridPos.h));
      return (
        <section key={row.id} data-row={row.title}>
          <h4 style={{ margin: '0 0 8px' }}>{row.title}</h4>
          <div style={{ position: 'relative', height: (bottom - top) * (CELL + GAP) }}>
            {panels.map((panel) => (
              <Panel key={panel.id} panel={panel} top={top} />
            ))}
          </div>
        </section>
      );
    })}
  </>,
);
