// Grafana's own types, as they look in a JSON file.
import type {
  DataQuery,
  Dashboard,
  DataTransformerConfig,
  FieldConfigSource,
  Panel,
} from "@grafana/schema";
import type { Options as StatOptions } from "@grafana/schema/dist/esm/raw/composable/stat/panelcfg/x/StatPanelCfg_types.gen";
import type {
  FieldConfig as StateTimelineFields,
  Options as StateTimelineOptions,
} from "@grafana/schema/dist/esm/raw/composable/statetimeline/panelcfg/x/StateTimelinePanelCfg_types.gen";
import type {
  FieldConfig as TableFields,
  Options as TableOptions,
} from "@grafana/schema/dist/esm/raw/composable/table/panelcfg/x/TablePanelCfg_types.gen";
import type {
  FieldConfig as TimeSeriesFields,
  Options as TimeSeriesOptions,
} from "@grafana/schema/dist/esm/raw/composable/timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen";

// An enum with text values is nominal in TypeScript: a JSON literal is never one. So each enum
// stands for the union of its texts; everything else stays as Grafana declares it.
export type Json<T> = unknown extends T
  ? T
  : T extends string
    ? `${T}`
    : T extends number | boolean | null | undefined
      ? T
      : T extends Array<infer Item>
        ? Array<Json<Item>>
        : T extends object
          ? { [Key in keyof T]: Json<T[Key]> }
          : T;

export type OverviewDashboard = Json<Dashboard>;

// In the dashboard's type a panel's options and targets are Record<string, unknown>: any text
// would do. So each panel is checked once more against its own plugin's types. Options may be
// left out (the plugin's defaults apply), but what is there must fit.
type Plugin<Type extends string, Options, Fields> = Json<
  Omit<Panel, "type" | "options" | "fieldConfig" | "targets" | "transformations"> & {
    type: Type;
    options?: Partial<Options>;
    fieldConfig: FieldConfigOf<Fields>;
    targets: Array<PrometheusQuery>;
    transformations?: Array<DataTransformerConfig>;
  }
>;

type FieldConfigOf<Fields> = {
  defaults: Omit<FieldConfigSource["defaults"], "custom"> & { custom?: Fields };
  overrides: FieldConfigSource["overrides"];
};

// The Prometheus query type is not in @grafana/schema: its base, and what we set beside it.
type PrometheusQuery = Omit<DataQuery, "datasource"> & {
  datasource: { type: "prometheus"; uid: string };
  expr: string;
  legendFormat: string;
  format: "time_series" | "table";
} & ({ instant: true; range: false } | { instant: false; range: true });

export type StatPanel = Plugin<"stat", StatOptions, Record<string, never>>;
export type StateTimelinePanel = Plugin<
  "state-timeline",
  StateTimelineOptions,
  Partial<StateTimelineFields>
>;
export type TablePanel = Plugin<"table", TableOptions, Partial<TableFields>>;
export type TimeSeriesPanel = Plugin<"timeseries", TimeSeriesOptions, TimeSeriesFields>;
